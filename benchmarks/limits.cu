// What one GPU gives an exchange that costs nothing: memory that reads once and writes several times, rows that move without
// being counted or announced, and launches of kernels that do nothing.
//
//     nvcc -O3 -std=c++17 -arch=sm_90a -o limits benchmarks/limits.cu && ./limits
//
// Times are medians by events. Before each one of memory, the device reads 512 MiB of something else.
#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <vector>

#include <cuda_runtime.h>

#define CHECK(call)                                                                                     \
  do {                                                                                                  \
    const cudaError_t error = (call);                                                                   \
    if (error != cudaSuccess) {                                                                         \
      std::fprintf(stderr, "%s: %s\n", #call, cudaGetErrorString(error));                               \
      std::exit(1);                                                                                     \
    }                                                                                                   \
  } while (0)

// The shape: ranks, tokens of each, bytes of a row, selections of a token, experts.
constexpr int kRanks = 8, kTokens = 4096, kRowBytes = 14336, kTopk = 8, kExperts = 256;
constexpr int kChunkBytes = 7168, kWarps = 8, kDepth = 2, kBlocks = 16;  // a block as TileEP's dispatch has it; blocks of a rank
constexpr size_t kRowsBytes = size_t(kRanks) * kTokens * kRowBytes, kColdBytes = size_t(512) << 20;
constexpr int kRepeat = 9, kReplays = 20;

// ---------------------------------------------------------------- memory

__global__ void read_all(const uint4 *from, size_t number, uint4 *out) {
  uint4 sum{};
  const size_t stride = size_t(gridDim.x) * blockDim.x;
  for (size_t i = blockIdx.x * size_t(blockDim.x) + threadIdx.x; i < number; i += stride) {
    const uint4 value = from[i];
    sum.x ^= value.x, sum.y ^= value.y, sum.z ^= value.z, sum.w ^= value.w;
  }
  if (sum.x == 1 && sum.y == 2 && sum.z == 3 && sum.w == 4) *out = sum;  // never, as far as the compiler knows
}

__global__ void fill(uint4 *to, size_t number) {
  const size_t stride = size_t(gridDim.x) * blockDim.x;
  for (size_t i = blockIdx.x * size_t(blockDim.x) + threadIdx.x; i < number; i += stride) to[i] = uint4{1, 2, 3, 4};
}

__device__ uint64_t evict_first() {
  uint64_t policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

// One array is read and `copies` are written behind each other, all from front to back.
__global__ void broadcast(const uint4 *from, uint4 *to, size_t number, int copies) {
  constexpr int kAhead = 4;
  const uint64_t policy = evict_first();
  const size_t stride = size_t(gridDim.x) * blockDim.x;
  for (size_t i = blockIdx.x * size_t(blockDim.x) + threadIdx.x; i < number; i += kAhead * stride) {
    uint4 value[kAhead];
#pragma unroll
    for (int j = 0; j < kAhead; ++j)
      if (i + j * stride < number) value[j] = from[i + j * stride];
    for (int copy = 0; copy < copies; ++copy)
#pragma unroll
      for (int j = 0; j < kAhead; ++j)
        if (i + j * stride < number)
          asm volatile("st.global.L2::cache_hint.v4.b32 [%0], {%1, %2, %3, %4}, %5;" ::"l"(to + copy * number + i + j * stride),
                       "r"(value[j].x), "r"(value[j].y), "r"(value[j].z), "r"(value[j].w), "l"(policy) : "memory");
  }
}

// ---------------------------------------------------------------- rows

__device__ uint32_t shared_address(const void *pointer) { return uint32_t(__cvta_generic_to_shared(pointer)); }

__device__ void fetch(uint32_t to, const uint8_t *from, uint32_t barrier) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(kChunkBytes) : "memory");
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to), "l"(from),
               "r"(kChunkBytes), "r"(barrier) : "memory");
}

__device__ void wait(uint32_t barrier, int parity) {
  uint32_t done = 0;
  while (done == 0)
    asm volatile("{\n\t.reg .pred p;\n\tmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n\tselp.u32 %0, 1, 0, p;\n\t}"
                 : "=r"(done) : "r"(barrier), "r"(parity) : "memory");
}

// Chunks of rows, of ranks `first` and, where one launch has all of them, those after it in turn: into shared memory once, out of
// it once for each destination. `to` holds up to kTopk addresses of each token, 0 where there are fewer.
__global__ void __launch_bounds__(32 * kWarps, 1)
    move_rows(const uint8_t *from, const uint64_t *to, uint32_t *taken, int first, int ranks) {
  extern __shared__ __align__(128) uint8_t stage[];
  __shared__ __align__(8) uint64_t barriers[kWarps][kDepth];
  constexpr int kChunks = kRowBytes / kChunkBytes, kItems = kTokens * kChunks;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, rank = first + int(blockIdx.x) % ranks;
  const uint64_t policy = evict_first();
  if (lane < kDepth)
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(&barriers[warp][lane])) : "memory");
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  __syncthreads();
  const auto take = [&] { return __shfl_sync(~0u, lane == 0 ? atomicAdd(taken + rank, 1) : 0, 0); };
  const auto slot = [&](int turn) { return shared_address(stage + (warp * kDepth + turn % kDepth) * kChunkBytes); };
  const auto barrier = [&](int turn) { return shared_address(&barriers[warp][turn % kDepth]); };
  const auto begin = [&](uint32_t item, int turn) {
    const size_t row = size_t(rank) * kTokens + item / kChunks;
    if (lane == 0) fetch(slot(turn), from + row * kRowBytes + item % kChunks * kChunkBytes, barrier(turn));
  };
  uint32_t item = take();
  if (item < kItems) begin(item, 0);
  for (int turn = 0; item < kItems; ++turn) {
    const uint32_t next = take();
    const size_t token = size_t(rank) * kTokens + item / kChunks;
    const uint64_t there = lane < kTopk ? to[token * kTopk + lane] : 0;
    wait(barrier(turn), turn / kDepth % 2);
    if (there != 0)
      asm volatile("cp.async.bulk.global.shared::cta.bulk_group.L2::cache_hint [%0], [%1], %2, %3;" ::"l"(
                       there + item % kChunks * kChunkBytes), "r"(slot(turn)), "r"(kChunkBytes), "l"(policy) : "memory");
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kDepth - 1) : "memory");
    __syncwarp();
    if (next < kItems) begin(next, turn + 1);
    item = next;
  }
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

// ---------------------------------------------------------------- launches

__global__ void nothing() {}

__global__ void hold_back(long cycles) {
  const long start = clock64();
  while (clock64() - start < cycles) {}
}

// ---------------------------------------------------------------- the measurements

struct Bench {
  uint8_t *from, *to, *cold;
  uint32_t *taken;
  cudaEvent_t begin, end, fork, join[kRanks];
  cudaStream_t streams[kRanks];
  double copy_tb_s = 0;

  Bench() {
    CHECK(cudaMalloc(&from, kRowsBytes));
    CHECK(cudaMalloc(&to, kTopk * kRowsBytes));
    CHECK(cudaMalloc(&cold, kColdBytes));
    CHECK(cudaMalloc(&taken, sizeof(uint32_t) * kRanks));
    CHECK(cudaMemset(from, 1, kRowsBytes));
    CHECK(cudaEventCreate(&begin));
    CHECK(cudaEventCreate(&end));
    CHECK(cudaEventCreateWithFlags(&fork, cudaEventDisableTiming));
    for (auto &event : join) CHECK(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
    for (auto &stream : streams) CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  }

  void chill() { read_all<<<264, 512>>>(reinterpret_cast<uint4 *>(cold), kColdBytes / 16, reinterpret_cast<uint4 *>(to)); }

  // `work` enqueues behind a kernel that holds the device back until the host is done.
  template <typename Work> float median_ms(bool memory, Work work) {
    std::vector<float> times;
    for (int round = 0; round < 2 + kRepeat; ++round) {
      CHECK(cudaMemsetAsync(taken, 0, sizeof(uint32_t) * kRanks));
      if (memory) chill();
      hold_back<<<1, 1>>>(2'000'000);
      CHECK(cudaEventRecord(begin));
      work();
      CHECK(cudaEventRecord(end));
      CHECK(cudaDeviceSynchronize());
      float ms;
      CHECK(cudaEventElapsedTime(&ms, begin, end));
      if (round >= 2) times.push_back(ms);
    }
    std::sort(times.begin(), times.end());
    return times[times.size() / 2];
  }

  template <typename Work> void moved(const char *name, double bytes, Work work) {
    const float ms = median_ms(true, work);
    const double tb_s = bytes / ms / 1e9;
    if (copy_tb_s == 0) copy_tb_s = tb_s;
    std::printf("%-44s %7.3f ms %7.3f TB/s %6.1f %% of a copy\n", name, ms, tb_s, 100 * tb_s / copy_tb_s);
  }

  // `each(rank, stream)` on `ranks` streams, between a fork from `origin` and a join.
  template <typename Each> void on_streams(int ranks, cudaStream_t origin, Each each) {
    CHECK(cudaEventRecord(fork, origin));
    for (int rank = 0; rank < ranks; ++rank) {
      CHECK(cudaStreamWaitEvent(streams[rank], fork));
      each(rank, streams[rank]);
      CHECK(cudaEventRecord(join[rank], streams[rank]));
    }
    for (int rank = 0; rank < ranks; ++rank) CHECK(cudaStreamWaitEvent(origin, join[rank]));
  }
};

// Where rows go, for uniform random experts: in the rank layout once to each rank of a token's experts, expanded once to each
// expert. Rows of a destination come by source rank and token.
std::vector<uint64_t> destinations(uint64_t to, bool expanded, size_t *rows) {
  constexpr int kOfRank = kExperts / kRanks;
  std::mt19937 random(1);
  std::vector<std::array<int, kTopk>> experts(kRanks * kTokens);
  std::array<int, kExperts> deck;
  for (int i = 0; i < kExperts; ++i) deck[i] = i;
  for (auto &token : experts)
    for (int k = 0; k < kTopk; ++k) {
      std::swap(deck[k], deck[k + random() % (kExperts - k)]);
      token[k] = deck[k];
    }
  std::vector<size_t> next(kExperts, 0);  // of a segment: of an expert, or of a rank
  std::vector<size_t> size(kExperts, 0);
  for (int pass = 0; pass < 2; ++pass) {
    std::vector<uint64_t> found(experts.size() * kTopk, 0);
    for (size_t token = 0; token < experts.size(); ++token)
      for (int k = 0; k < kTopk; ++k) {
        const int expert = experts[token][k], segment = expanded ? expert : expert / kOfRank;
        const auto same = [&](int other) { return other / kOfRank == expert / kOfRank; };
        if (!expanded && std::any_of(experts[token].begin(), experts[token].begin() + k, same)) continue;
        found[token * kTopk + k] = to + next[segment]++ * kRowBytes;
        ++size[segment];
      }
    if (pass == 1) return found;
    *rows = 0;
    for (int segment = 0; segment < kExperts; ++segment) {
      next[segment] = *rows;
      *rows += size[segment];
    }
  }
  return {};
}

int main() {
  Bench bench;
  for (int i = 0; i < 300; ++i) bench.chill();  // clocks are up
  auto *from = reinterpret_cast<uint4 *>(bench.from), *to = reinterpret_cast<uint4 *>(bench.to);
  constexpr size_t kNumber = kRowsBytes / 16;
  bench.moved("copy", 2.0 * 4 * kRowsBytes,
              [&] { CHECK(cudaMemcpyAsync(to, to + 4 * kNumber, 4 * kRowsBytes, cudaMemcpyDeviceToDevice)); });

  std::printf("\nordinary loads and stores, front to back\n");
  for (int blocks : {132, 528}) {
    std::printf("%d blocks\n", blocks);
    bench.moved("read", kRowsBytes, [&] { read_all<<<blocks, 512>>>(from, kNumber, to); });
    bench.moved("write", 5.0 * kRowsBytes, [&] { fill<<<blocks, 512>>>(to, 5 * kNumber); });
    for (int copies : {1, 2, 3, 5, 8}) {
      char name[64];
      std::snprintf(name, sizeof name, "read 1, write %d", copies);
      bench.moved(name, (1.0 + copies) * kRowsBytes, [&] { broadcast<<<blocks, 512>>>(from, to, kNumber, copies); });
    }
  }

  constexpr size_t kShared = size_t(kWarps) * kDepth * kChunkBytes;
  CHECK(cudaFuncSetAttribute(move_rows, cudaFuncAttributeMaxDynamicSharedMemorySize, kShared));
  for (bool expanded : {false, true}) {
    size_t rows;
    const std::vector<uint64_t> table = destinations(reinterpret_cast<uint64_t>(bench.to), expanded, &rows);
    uint64_t *on_device;
    CHECK(cudaMalloc(&on_device, table.size() * sizeof(uint64_t)));
    CHECK(cudaMemcpy(on_device, table.data(), table.size() * sizeof(uint64_t), cudaMemcpyHostToDevice));
    const double bytes = (double(rows) + kRanks * kTokens) * kRowBytes;
    std::printf("\nrows to %s, by bulk copies, nothing else\n", expanded ? "experts" : "ranks");
    bench.moved("one launch", bytes, [&] {
      move_rows<<<kRanks * kBlocks, 32 * kWarps, kShared>>>(bench.from, on_device, bench.taken, 0, kRanks);
    });
    bench.moved("a launch for each rank", bytes, [&] {
      bench.on_streams(kRanks, nullptr, [&](int rank, cudaStream_t stream) {
        move_rows<<<kBlocks, 32 * kWarps, kShared, stream>>>(bench.from, on_device, bench.taken, rank, 1);
      });
    });
    CHECK(cudaFree(on_device));
  }

  std::printf("\nkernels that do nothing, %d blocks each, with fork and join\n", kBlocks);
  cudaStream_t origin;
  CHECK(cudaStreamCreateWithFlags(&origin, cudaStreamNonBlocking));
  for (int ranks : {1, 2, 4, 8})
    for (int kernels : {1, 2}) {
      const auto each = [&](int, cudaStream_t stream) {
        for (int i = 0; i < kernels; ++i) nothing<<<kBlocks, 256, 0, stream>>>();
      };
      const float eager = bench.median_ms(false, [&] { bench.on_streams(ranks, nullptr, each); });
      CHECK(cudaStreamBeginCapture(origin, cudaStreamCaptureModeThreadLocal));
      bench.on_streams(ranks, origin, each);
      cudaGraph_t graph;
      cudaGraphExec_t replay;
      CHECK(cudaStreamEndCapture(origin, &graph));
      CHECK(cudaGraphInstantiate(&replay, graph, 0));
      const float train = bench.median_ms(false, [&] {
        for (int i = 0; i < kReplays; ++i) CHECK(cudaGraphLaunch(replay, nullptr));
      });
      std::printf("%d streams x %d: %5.1f us, as a graph %5.1f us a replay\n", ranks, kernels, 1e3 * eager, 1e3 * train / kReplays);
      CHECK(cudaGraphExecDestroy(replay));
      CHECK(cudaGraphDestroy(graph));
    }
  CHECK(cudaDeviceSynchronize());
}
