// The device layer: every access to memory that another block or another rank also touches, every fence,
// every asynchronous copy and the clock. Nothing above it contains PTX. Compiled with TILE_EP_SIM defined, the
// simulator's own device layer takes its place and the rest of the source stays as it is.
//
// Addresses are 64-bit integers; `uint32_t` shared-memory addresses are offsets in the shared window.
#ifdef TILE_EP_SIM
#include "sim_device.h"
#else
#include <cstdint>

#define EP_DEVICE __device__ __forceinline__

// -- weak loads and stores. Ordered by the fences and flags around them, by nothing else.
template <typename T> EP_DEVICE T ep_load(uint64_t address) { return *reinterpret_cast<const T *>(address); }
template <typename T> EP_DEVICE void ep_store(uint64_t address, T value) { *reinterpret_cast<T *>(address) = value; }

// -- flags: 64-bit words at system scope, 32-bit counters at device scope.
EP_DEVICE uint64_t ep_load_acquire_sys(uint64_t address) {
  uint64_t value;
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(address) : "memory");
  return value;
}
EP_DEVICE void ep_store_release_sys(uint64_t address, uint64_t value) {
  asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(address), "l"(value) : "memory");
}
EP_DEVICE uint32_t ep_atomic_add_acq_rel_gpu(uint64_t address, uint32_t value) {
  uint32_t old;
  asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], %2;" : "=r"(old) : "l"(address), "r"(value) : "memory");
  return old;
}
EP_DEVICE uint32_t ep_atomic_add_relaxed_gpu(uint64_t address, uint32_t value) {
  uint32_t old;
  asm volatile("atom.relaxed.gpu.global.add.u32 %0, [%1], %2;" : "=r"(old) : "l"(address), "r"(value) : "memory");
  return old;
}
EP_DEVICE void ep_fence_sys() { asm volatile("fence.acq_rel.sys;" ::: "memory"); }

// -- shared memory and its barriers.
EP_DEVICE uint32_t ep_shared_address(const void *pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}
// Makes initialised barriers visible to the copy engine. Call it once, then synchronise the block.
EP_DEVICE void ep_mbarrier_init(uint32_t barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
EP_DEVICE void ep_mbarrier_init_fence() {
  asm volatile("fence.mbarrier_init.release.cluster;\n\tfence.proxy.async.shared::cta;" ::: "memory");
}
EP_DEVICE void ep_mbarrier_arrive_expect(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
EP_DEVICE bool ep_mbarrier_try_wait(uint32_t barrier, uint32_t parity) {
  uint32_t done;
  asm volatile(
      "{\n\t.reg .pred p;\n\tmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n\tselp.u32 %0, 1, 0, p;\n\t}"
      : "=r"(done) : "r"(barrier), "r"(parity) : "memory");
  return done != 0;
}
// Orders this thread's earlier reads and writes of shared memory before later accesses of the copy engine.
EP_DEVICE void ep_fence_async_shared() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// -- bulk copies: 16-byte aligned addresses and sizes; loads complete on a barrier, stores in groups.
EP_DEVICE void ep_bulk_load(uint32_t shared, uint64_t address, uint32_t bytes, uint32_t barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(shared),
               "l"(address), "r"(bytes), "r"(barrier) : "memory");
}
EP_DEVICE void ep_bulk_store(uint64_t address, uint32_t shared, uint32_t bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(address), "r"(shared), "r"(bytes)
               : "memory");
}
EP_DEVICE void ep_bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// Waits until at most N of this thread's groups still read shared memory.
template <int N> EP_DEVICE void ep_bulk_wait_read() { asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(N) : "memory"); }
// Waits until all of this thread's groups have been written.
EP_DEVICE void ep_bulk_wait_all() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

// -- time.
EP_DEVICE uint64_t ep_now_ns() {
  uint64_t now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now)::"memory");
  return now;
}
EP_DEVICE void ep_pause() { __nanosleep(64); }
#endif

// Leaves of primitives.py, written on top of the device layer. Warp functions are called by all 32 lanes of a
// converged warp with equal arguments, unless they say otherwise.

// ---------------------------------------------------------------- copies by a warp, any size and alignment

// `units` elements of T from `source` to `address`, both aligned to T, eight loads in flight per lane.
template <typename T> EP_DEVICE void ep_copy_units(uint64_t address, uint64_t source, uint64_t units, int lane) {
  constexpr int kInFlight = 8;
  uint64_t i = lane;
  for (; i + 32 * (kInFlight - 1) < units; i += 32 * kInFlight) {
    T value[kInFlight];
#pragma unroll
    for (int j = 0; j < kInFlight; ++j) value[j] = ep_load<T>(source + (i + 32 * j) * sizeof(T));
#pragma unroll
    for (int j = 0; j < kInFlight; ++j) ep_store<T>(address + (i + 32 * j) * sizeof(T), value[j]);
  }
  for (; i < units; i += 32) ep_store<T>(address + i * sizeof(T), ep_load<T>(source + i * sizeof(T)));
}

// Copies `bytes` with the widest unit that the two addresses have in common: a head up to the first common boundary and
// a tail after the last one go byte by byte, so that no byte outside the range is touched.
EP_DEVICE void ep_copy_warp(uint64_t address, uint64_t source, uint64_t bytes) {
  const int lane = threadIdx.x & 31;
  const uint64_t skew = (address ^ source) & 15;
  const uint64_t unit = skew == 0 ? 16 : (skew & (~skew + 1));
  uint64_t head = (unit - (address & (unit - 1))) & (unit - 1);
  if (head > bytes) head = bytes;
  const uint64_t units = (bytes - head) / unit, body = units * unit, tail = bytes - head - body;
  if (lane < head) ep_store<uint8_t>(address + lane, ep_load<uint8_t>(source + lane));
  const uint64_t to = address + head, from = source + head;
  if (unit == 16) ep_copy_units<uint4>(to, from, units, lane);
  else if (unit == 8) ep_copy_units<uint64_t>(to, from, units, lane);
  else if (unit == 4) ep_copy_units<uint32_t>(to, from, units, lane);
  else if (unit == 2) ep_copy_units<uint16_t>(to, from, units, lane);
  else ep_copy_units<uint8_t>(to, from, units, lane);
  if (lane < tail) ep_store<uint8_t>(to + body + lane, ep_load<uint8_t>(from + body + lane));
}

// ---------------------------------------------------------------- waiting, with a bound

// What a wait that gave up leaves behind for the host: a word per peer, (epoch << 32 | phase), written whole.
EP_DEVICE void ep_record_timeout(uint64_t status, int phase, int peer, uint64_t epoch) {
  ep_store_release_sys(status + 8 * peer, (epoch << 32) | static_cast<uint64_t>(phase));
}

// Waits until the upper half of the word is `epoch`; returns its lower half, or -1 after `timeout_ns`.
EP_DEVICE int64_t ep_wait_tag(uint64_t address, uint64_t epoch, uint64_t status, int phase, int peer, uint64_t timeout_ns) {
  uint64_t word = ep_load_acquire_sys(address);
  if ((word >> 32) == (epoch & 0xffffffffu)) return static_cast<int64_t>(word & 0xffffffffu);
  const uint64_t start = ep_now_ns();
  while (true) {
    word = ep_load_acquire_sys(address);
    if ((word >> 32) == (epoch & 0xffffffffu)) return static_cast<int64_t>(word & 0xffffffffu);
    if (ep_now_ns() - start > timeout_ns) {
      ep_record_timeout(status, phase, peer, epoch);
      return -1;
    }
    ep_pause();
  }
}

// ---------------------------------------------------------------- the grid

// Called by one thread of each block, after the block synchronised. True in the block that arrives last; what every block
// did before its arrival is then visible to it, within this device: what peers shall see too is fenced by whoever wrote
// it. The counter is back at zero for the next use.
EP_DEVICE int ep_arrive_last(uint64_t counter, uint32_t num_blocks) {
  const bool last = ep_atomic_add_acq_rel_gpu(counter, 1) == num_blocks - 1;
  if (last) ep_store<uint32_t>(counter, 0);
  return last;
}

// ---------------------------------------------------------------- barriers of shared memory

EP_DEVICE void ep_mbarrier_wait(const void *barrier, int parity) {
  const uint32_t address = ep_shared_address(barrier);
  while (!ep_mbarrier_try_wait(address, parity)) {}
}

// ---------------------------------------------------------------- typed entry points for call_extern
EP_DEVICE void ep_put_u8(uint64_t a, uint8_t v) { ep_store<uint8_t>(a, v); }
EP_DEVICE void ep_put_u16(uint64_t a, uint16_t v) { ep_store<uint16_t>(a, v); }
EP_DEVICE void ep_put_u32(uint64_t a, uint32_t v) { ep_store<uint32_t>(a, v); }
EP_DEVICE void ep_put_u64(uint64_t a, uint64_t v) { ep_store<uint64_t>(a, v); }
EP_DEVICE void ep_put_f32(uint64_t a, float v) { ep_store<float>(a, v); }
EP_DEVICE uint8_t ep_get_u8(uint64_t a) { return ep_load<uint8_t>(a); }
EP_DEVICE uint16_t ep_get_u16(uint64_t a) { return ep_load<uint16_t>(a); }
EP_DEVICE uint32_t ep_get_u32(uint64_t a) { return ep_load<uint32_t>(a); }
EP_DEVICE uint64_t ep_get_u64(uint64_t a) { return ep_load<uint64_t>(a); }
EP_DEVICE float ep_get_f32(uint64_t a) { return ep_load<float>(a); }
// 16 bytes between registers and memory; `local` is a 16-byte aligned local array.
EP_DEVICE void ep_put_16(uint64_t a, const void *local) { ep_store<uint4>(a, *reinterpret_cast<const uint4 *>(local)); }
EP_DEVICE void ep_get_16(void *local, uint64_t a) { *reinterpret_cast<uint4 *>(local) = ep_load<uint4>(a); }

EP_DEVICE uint64_t ep_address(const void *pointer) { return reinterpret_cast<uint64_t>(pointer); }
EP_DEVICE void ep_barrier_init(const void *barrier, int arrivals) { ep_mbarrier_init(ep_shared_address(barrier), arrivals); }
// One thread: announce `bytes` on the barrier, then fetch them.
EP_DEVICE void ep_fetch(const void *shared, uint64_t address, int bytes, const void *barrier) {
  const uint32_t at = ep_shared_address(barrier);
  ep_mbarrier_arrive_expect(at, bytes);
  ep_bulk_load(ep_shared_address(shared), address, bytes, at);
}
EP_DEVICE void ep_push(uint64_t address, const void *shared, int bytes) {
  ep_bulk_store(address, ep_shared_address(shared), bytes);
}
// One element of 2 or 4 bytes between a local array of any type and memory.
EP_DEVICE void ep_put_2(uint64_t a, const void *local) { ep_store<uint16_t>(a, *reinterpret_cast<const uint16_t *>(local)); }
EP_DEVICE void ep_get_2(void *local, uint64_t a) { *reinterpret_cast<uint16_t *>(local) = ep_load<uint16_t>(a); }
EP_DEVICE void ep_put_4(uint64_t a, const void *local) { ep_store<uint32_t>(a, *reinterpret_cast<const uint32_t *>(local)); }
EP_DEVICE void ep_get_4(void *local, uint64_t a) { *reinterpret_cast<uint32_t *>(local) = ep_load<uint32_t>(a); }
#if defined(_MSC_VER) && !defined(__clang__) && _MSC_VER < 1940
#define _tl_orig_alignas alignas
#define alignas(N) _tl_orig_alignas((N) <= 64 ? (N) : 64)
#include <cuda.h>
#undef alignas
#define alignas _tl_orig_alignas
#endif
#include <tl_templates/cuda/reduce.h>
#include <tl_templates/cuda/scan.h>
#include <tl_templates/cuda/ldsm.h>
#include <tl_templates/cuda/threadblock_swizzle.h>
#include <tl_templates/cuda/debug.h>
#ifdef ENABLE_BF16
#include <tl_templates/cuda/cuda_bf16_fallbacks.cuh>
#endif

extern "C" __global__ void dispatch_kernel(const uint64_t* __restrict__ peers, int64_t counts, int64_t idx_at, int max_tokens, int num_blocks, int num_tokens, int rank, int64_t rows, int64_t scales_at, int slot, int64_t slot_bytes, int64_t slots_at, int64_t source_at, int64_t status, int64_t timeout_ns, int64_t topk_idx, int64_t topk_weights, int64_t weights_at, int64_t x, int64_t x_scales);
extern "C" __global__ void __launch_bounds__(3072, 1) dispatch_kernel(const uint64_t* __restrict__ peers, int64_t counts, int64_t idx_at, int max_tokens, int num_blocks, int num_tokens, int rank, int64_t rows, int64_t scales_at, int slot, int64_t slot_bytes, int64_t slots_at, int64_t source_at, int64_t status, int64_t timeout_ns, int64_t topk_idx, int64_t topk_weights, int64_t weights_at, int64_t x, int64_t x_scales) {
  uint64_t own = (uint64_t)0;
  uint64_t epoch = (uint64_t)0;
  int block_begin = 0;
  int block_end = 0;
  int share = 0;
  __shared__ __align__(16) int flags[4];
  __shared__ __align__(16) uint64_t bars[192];
  int i = 0;
  __shared__ __align__(16) int base[768];
  __shared__ __align__(16) int totals[24];
  int i_1 = 0;
  int source = 0;
  int column = 0;
  int64_t got = (int64_t)0;
  __shared__ __align__(16) int peer_slot[8];
  __shared__ __align__(16) int count[64];
  int alive = 0;
  int items = 0;
  int turn = 0;
  int taken[1];
  signed char here = (signed char)0;
  extern __shared__ __align__(1024) uchar stage[];
  int64_t raw = (int64_t)0;
  int row = 0;
  float weight = 0x0p+0f/*0.000000e+00*/;
  int counted_by = 0;
  int expert = 0;
  int dest = 0;
  uint mask = (uint)0;
  uint64_t region = (uint64_t)0;
  uint64_t to[1];
  int item = 0;
  signed char here_1 = (signed char)0;
  int64_t raw_1 = (int64_t)0;
  int row_1 = 0;
  float weight_1 = 0x0p+0f/*0.000000e+00*/;
  int counted_by_1 = 0;
  int expert_1 = 0;
  int dest_1 = 0;
  uint mask_1 = (uint)0;
  uint64_t region_1 = (uint64_t)0;
  int received = 0;
  uint64_t to_1 = (uint64_t)0;
  int64_t bound = (int64_t)0;
  int64_t entry = (int64_t)0;
  int last = 0;
  int i_2 = 0;
  int64_t got_1 = (int64_t)0;
  int arrived = 0;
  own = peers[((int64_t)rank)];
  epoch = (ep_get_u64(own) + (uint64_t)1);
  int64_t rmod = ((((int64_t)num_tokens) * ((int64_t)((int)blockIdx.x))) % ((int64_t)num_blocks));
  int64_t rdiv = ((((int64_t)num_tokens) * ((int64_t)((int)blockIdx.x))) / ((int64_t)num_blocks));
  block_begin = ((int)(((((int64_t)0 <= ((int64_t)num_blocks)) && ((int64_t)0 <= rmod)) || ((((int64_t)num_blocks) < (int64_t)0) && (rmod <= (int64_t)0))) ? rdiv : (rdiv - (int64_t)1)));
  int64_t rmod_1 = ((((int64_t)num_tokens) * (((int64_t)((int)blockIdx.x)) + (int64_t)1)) % ((int64_t)num_blocks));
  int64_t rdiv_1 = ((((int64_t)num_tokens) * (((int64_t)((int)blockIdx.x)) + (int64_t)1)) / ((int64_t)num_blocks));
  block_end = ((int)(((((int64_t)0 <= ((int64_t)num_blocks)) && ((int64_t)0 <= rmod_1)) || ((((int64_t)num_blocks) < (int64_t)0) && (rmod_1 <= (int64_t)0))) ? rdiv_1 : (rdiv_1 - (int64_t)1)));
  share = max((((block_end + 95) - block_begin) / 96), 1);
  if (((int)threadIdx.x) < 3) {
    flags[((int)threadIdx.x)] = 0;
  }
  if (((int)threadIdx.x) == 0) {
    for (int w = 0; w < 96; ++w) {
      for (int b = 0; b < 2; ++b) {
        ep_barrier_init((&(bars[((w * 2) + b)])), 1);
      }
    }
    ep_mbarrier_init_fence();
  }
  i = ((int)threadIdx.x);
  while (1) {
    if (!((i < 768))) { break; }
    base[i] = 0;
    i = (i + 3072);
  }
  i = ((int)threadIdx.x);
  while (1) {
    if (!((i < 24))) { break; }
    totals[i] = 0;
    i = (i + 3072);
  }
  __syncthreads();
  if ((((int)blockIdx.x) == 0) && (((int)threadIdx.x) < 8)) {
    ep_store_release_sys(((peers[((int)threadIdx.x)] + (uint64_t)256) + (((uint64_t)(rank * 25)) * (uint64_t)8)), ((epoch << (uint64_t)32) | ((uint64_t)slot)));
  }
  i_1 = ((int)threadIdx.x);
  while (1) {
    if (!((i_1 < 8))) { break; }
    source = i_1;
    column = 0;
    got = ep_wait_tag(((own + (uint64_t)256) + (((uint64_t)((source * 25) + column)) * (uint64_t)8)), epoch, ((uint64_t)status), 1, source, ((uint64_t)timeout_ns));
    if (got < (int64_t)0) {
      flags[0] = 1;
    }
    if (column == 0) {
      peer_slot[source] = ((int)got);
    } else {
      count[(((((int64_t)source) * (int64_t)8) + ((int64_t)column)) - (int64_t)1)] = ((int)got);
    }
    i_1 = (i_1 + 3072);
  }
  __syncthreads();
  int condval;
  if ((flags[0] == 0)) {
    condval = 1;
  } else {
    condval = 0;
  }
  alive = condval;
  if (alive == 1) {
    items = (num_tokens * 96);
  }
  if (alive == 1) {
    turn = 0;
  }
  if (alive == 1) {
    int turn_1 = turn;
    taken[0] = 0;
    if ((((int)threadIdx.x) % 32) == 0) {
      taken[0] = ((int)ep_atomic_add_relaxed_gpu((own + (uint64_t)192), (uint)1));
    }
    taken[0] = __shfl_sync((uint)4294967295, taken[0], 0, 32);
    here = ((signed char)(taken[0] < (num_tokens * 96)));
    if ((bool)here) {
      ep_bulk_wait_read<1>();
    }
    if ((bool)here) {
      __syncwarp();
    }
    if ((bool)here) {
      if ((((int)threadIdx.x) % 32) == 0) {
        ep_fetch((&(stage[(((((int)threadIdx.x) >> 5) * 256) + ((turn_1 & 1) * 128))])), ((((uint64_t)x) + (((uint64_t)((taken[0] / 96) + ((taken[0] % 96) >> 31))) * (uint64_t)192)) + ((uint64_t)(((96 & ((taken[0] % 96) >> 31)) * 2) + ((taken[0] % 96) * 2)))), 2, (&(bars[(((((int)threadIdx.x) >> 5) * 2) + (turn_1 & 1))])));
      }
    }
    if ((bool)here) {
      int token = ((taken[0] / 96) + ((taken[0] % 96) >> 31));
      int part = ((96 & ((taken[0] % 96) >> 31)) + (taken[0] % 96));
      raw = (int64_t)-1;
      row = -1;
      weight = 0x0p+0f/*0.000000e+00*/;
      int64_t rmod_2 = ((((((int64_t)token) + (int64_t)1) * ((int64_t)num_blocks)) - (int64_t)1) % ((int64_t)num_tokens));
      int64_t rdiv_2 = ((((((int64_t)token) + (int64_t)1) * ((int64_t)num_blocks)) - (int64_t)1) / ((int64_t)num_tokens));
      counted_by = ((int)(((((int64_t)0 <= ((int64_t)num_tokens)) && ((int64_t)0 <= rmod_2)) || ((((int64_t)num_tokens) < (int64_t)0) && (rmod_2 <= (int64_t)0))) ? rdiv_2 : (rdiv_2 - (int64_t)1)));
      if ((((int)threadIdx.x) & 31) < 8) {
        raw = ((int64_t)ep_get_u64((((uint64_t)topk_idx) + (((uint64_t)((((int64_t)token) * (int64_t)8) + (((int64_t)((int)threadIdx.x)) & (int64_t)31))) * (uint64_t)8))));
        row = ((int)ep_get_u32((((uint64_t)rows) + (((uint64_t)((((int64_t)token) * (int64_t)8) + (((int64_t)((int)threadIdx.x)) & (int64_t)31))) * (uint64_t)4))));
      }
      if (((((int)threadIdx.x) & 31) < 8) && (part == 0)) {
        weight = ep_get_f32((((uint64_t)topk_weights) + (((uint64_t)((((int64_t)token) * (int64_t)8) + (((int64_t)((int)threadIdx.x)) & (int64_t)31))) * (uint64_t)4)));
      }
      int condval_1;
      if ((row != -1)) {
        condval_1 = ((int)raw);
      } else {
        condval_1 = -1;
      }
      expert = condval_1;
      int condval_2;
      if ((row != -1)) {
        condval_2 = (expert >> 1);
      } else {
        condval_2 = -1;
      }
      dest = condval_2;
      int condval_3;
      if ((0 <= dest)) {
        condval_3 = dest;
      } else {
        condval_3 = ((0 - (((int)threadIdx.x) & 31)) - 1);
      }
      uint same = __match_any_sync((uint)4294967295, condval_3);
      bool leads = ((0 <= dest) && (((int)__popc((same & (((uint)1 << ((uint)(((int)threadIdx.x) & 31))) - (uint)1)))) == 0));
      mask = ((uint)((unsigned long long)__ballot_sync((uint)4294967295, leads)));
      region = (uint64_t)0;
      if (0 <= dest) {
        region = ((peers[dest] + ((uint64_t)slots_at)) + (((uint64_t)peer_slot[dest]) * ((uint64_t)slot_bytes)));
      }
      uint64_t condval_4;
      if (leads) {
        condval_4 = ((region + (((uint64_t)row) * (uint64_t)192)) + ((uint64_t)(part * 2)));
      } else {
        condval_4 = (uint64_t)0;
      }
      to[0] = condval_4;
      if (0 < part) {
        mask = (uint)0;
      }
      while (1) {
        if (!((mask != (uint)0))) { break; }
        int leader = (__ffs(((int)mask)) - 1);
        uint64_t there = __shfl_sync((uint)4294967295, region, leader, 32);
        int there_row = __shfl_sync((uint)4294967295, row, leader, 32);
        int there_rank = __shfl_sync((uint)4294967295, dest, leader, 32);
        if ((((int)threadIdx.x) & 31) < 8) {
          int condval_5;
          if ((dest == there_rank)) {
            condval_5 = ((expert - min(there_rank, 0)) - (there_rank * 2));
          } else {
            condval_5 = -1;
          }
          ep_put_u64(((there + ((uint64_t)idx_at)) + (((uint64_t)((((int64_t)there_row) * (int64_t)8) + (((int64_t)((int)threadIdx.x)) & (int64_t)31))) * (uint64_t)8)), condval_5);
          ep_put_f32(((there + ((uint64_t)weights_at)) + (((uint64_t)((((int64_t)there_row) * (int64_t)8) + (((int64_t)((int)threadIdx.x)) & (int64_t)31))) * (uint64_t)4)), weight);
        }
        if ((((int)threadIdx.x) % 32) == 0) {
          ep_put_u64(((there + ((uint64_t)source_at)) + (((uint64_t)there_row) * (uint64_t)8)), (((uint64_t)((rank * max_tokens) + token)) | (((uint64_t)((rank * 8) + leader)) << (uint64_t)32)));
        }
        ep_copy_warp(((there + ((uint64_t)scales_at)) + (((uint64_t)there_row) * (uint64_t)8)), (((uint64_t)x_scales) + (((uint64_t)token) * (uint64_t)8)), (uint64_t)8);
        mask = (mask & (mask - (uint)1));
      }
    }
    item = taken[0];
    while (1) {
      if (!((item < items))) { break; }
      ep_mbarrier_wait((&(bars[(((((int)threadIdx.x) >> 5) * 2) + (turn & 1))])), ((turn & 3) >> 1));
      if (to[0] != (uint64_t)0) {
        ep_push(to[0], (&(stage[(((((int)threadIdx.x) >> 5) * 256) + ((turn & 1) * 128))])), 2);
      }
      ep_bulk_commit();
      turn = (turn + 1);
      int turn_2 = turn;
      taken[0] = 0;
      if ((((int)threadIdx.x) % 32) == 0) {
        taken[0] = ((int)ep_atomic_add_relaxed_gpu((own + (uint64_t)192), (uint)1));
      }
      taken[0] = __shfl_sync((uint)4294967295, taken[0], 0, 32);
      here_1 = ((signed char)(taken[0] < (num_tokens * 96)));
      if ((bool)here_1) {
        ep_bulk_wait_read<1>();
      }
      if ((bool)here_1) {
        __syncwarp();
      }
      if ((bool)here_1) {
        if ((((int)threadIdx.x) % 32) == 0) {
          ep_fetch((&(stage[(((((int)threadIdx.x) >> 5) * 256) + ((turn_2 & 1) * 128))])), ((((uint64_t)x) + (((uint64_t)((taken[0] / 96) + ((taken[0] % 96) >> 31))) * (uint64_t)192)) + ((uint64_t)(((96 & ((taken[0] % 96) >> 31)) * 2) + ((taken[0] % 96) * 2)))), 2, (&(bars[(((((int)threadIdx.x) >> 5) * 2) + (turn_2 & 1))])));
        }
      }
      if ((bool)here_1) {
        int token_1 = ((taken[0] / 96) + ((taken[0] % 96) >> 31));
        int part_1 = ((96 & ((taken[0] % 96) >> 31)) + (taken[0] % 96));
        raw_1 = (int64_t)-1;
        row_1 = -1;
        weight_1 = 0x0p+0f/*0.000000e+00*/;
        int64_t rmod_3 = ((((((int64_t)token_1) + (int64_t)1) * ((int64_t)num_blocks)) - (int64_t)1) % ((int64_t)num_tokens));
        int64_t rdiv_3 = ((((((int64_t)token_1) + (int64_t)1) * ((int64_t)num_blocks)) - (int64_t)1) / ((int64_t)num_tokens));
        counted_by_1 = ((int)(((((int64_t)0 <= ((int64_t)num_tokens)) && ((int64_t)0 <= rmod_3)) || ((((int64_t)num_tokens) < (int64_t)0) && (rmod_3 <= (int64_t)0))) ? rdiv_3 : (rdiv_3 - (int64_t)1)));
        if ((((int)threadIdx.x) & 31) < 8) {
          raw_1 = ((int64_t)ep_get_u64((((uint64_t)topk_idx) + (((uint64_t)((((int64_t)token_1) * (int64_t)8) + (((int64_t)((int)threadIdx.x)) & (int64_t)31))) * (uint64_t)8))));
          row_1 = ((int)ep_get_u32((((uint64_t)rows) + (((uint64_t)((((int64_t)token_1) * (int64_t)8) + (((int64_t)((int)threadIdx.x)) & (int64_t)31))) * (uint64_t)4))));
        }
        if (((((int)threadIdx.x) & 31) < 8) && (part_1 == 0)) {
          weight_1 = ep_get_f32((((uint64_t)topk_weights) + (((uint64_t)((((int64_t)token_1) * (int64_t)8) + (((int64_t)((int)threadIdx.x)) & (int64_t)31))) * (uint64_t)4)));
        }
        int condval_6;
        if ((row_1 != -1)) {
          condval_6 = ((int)raw_1);
        } else {
          condval_6 = -1;
        }
        expert_1 = condval_6;
        int condval_7;
        if ((row_1 != -1)) {
          condval_7 = (expert_1 >> 1);
        } else {
          condval_7 = -1;
        }
        dest_1 = condval_7;
        int condval_8;
        if ((0 <= dest_1)) {
          condval_8 = dest_1;
        } else {
          condval_8 = ((0 - (((int)threadIdx.x) & 31)) - 1);
        }
        uint same_1 = __match_any_sync((uint)4294967295, condval_8);
        bool leads_1 = ((0 <= dest_1) && (((int)__popc((same_1 & (((uint)1 << ((uint)(((int)threadIdx.x) & 31))) - (uint)1)))) == 0));
        mask_1 = ((uint)((unsigned long long)__ballot_sync((uint)4294967295, leads_1)));
        region_1 = (uint64_t)0;
        if (0 <= dest_1) {
          region_1 = ((peers[dest_1] + ((uint64_t)slots_at)) + (((uint64_t)peer_slot[dest_1]) * ((uint64_t)slot_bytes)));
        }
        uint64_t condval_9;
        if (leads_1) {
          condval_9 = ((region_1 + (((uint64_t)row_1) * (uint64_t)192)) + ((uint64_t)(part_1 * 2)));
        } else {
          condval_9 = (uint64_t)0;
        }
        to[0] = condval_9;
        if (0 < part_1) {
          mask_1 = (uint)0;
        }
        while (1) {
          if (!((mask_1 != (uint)0))) { break; }
          int leader_1 = (__ffs(((int)mask_1)) - 1);
          uint64_t there_1 = __shfl_sync((uint)4294967295, region_1, leader_1, 32);
          int there_row_1 = __shfl_sync((uint)4294967295, row_1, leader_1, 32);
          int there_rank_1 = __shfl_sync((uint)4294967295, dest_1, leader_1, 32);
          if ((((int)threadIdx.x) & 31) < 8) {
            int condval_10;
            if ((dest_1 == there_rank_1)) {
              condval_10 = ((expert_1 - min(there_rank_1, 0)) - (there_rank_1 * 2));
            } else {
              condval_10 = -1;
            }
            ep_put_u64(((there_1 + ((uint64_t)idx_at)) + (((uint64_t)((((int64_t)there_row_1) * (int64_t)8) + (((int64_t)((int)threadIdx.x)) & (int64_t)31))) * (uint64_t)8)), condval_10);
            ep_put_f32(((there_1 + ((uint64_t)weights_at)) + (((uint64_t)((((int64_t)there_row_1) * (int64_t)8) + (((int64_t)((int)threadIdx.x)) & (int64_t)31))) * (uint64_t)4)), weight_1);
          }
          if ((((int)threadIdx.x) % 32) == 0) {
            ep_put_u64(((there_1 + ((uint64_t)source_at)) + (((uint64_t)there_row_1) * (uint64_t)8)), (((uint64_t)((rank * max_tokens) + token_1)) | (((uint64_t)((rank * 8) + leader_1)) << (uint64_t)32)));
          }
          ep_copy_warp(((there_1 + ((uint64_t)scales_at)) + (((uint64_t)there_row_1) * (uint64_t)8)), (((uint64_t)x_scales) + (((uint64_t)token_1) * (uint64_t)8)), (uint64_t)8);
          mask_1 = (mask_1 & (mask_1 - (uint)1));
        }
      }
      item = taken[0];
    }
    received = 0;
    received = ((int)ep_get_u32((((uint64_t)counts) + (uint64_t)28)));
    to_1 = ((own + ((uint64_t)slots_at)) + (((uint64_t)slot) * ((uint64_t)slot_bytes)));
    bound = (((int64_t)max_tokens) * (int64_t)64);
    entry = (((((int64_t)((int)blockIdx.x)) * (int64_t)3072) + (((int64_t)received) * (int64_t)8)) + ((int64_t)((int)threadIdx.x)));
    while (1) {
      if (!((entry < bound))) { break; }
      ep_put_u64(((to_1 + ((uint64_t)idx_at)) + (((uint64_t)entry) * (uint64_t)8)), -1);
      ep_put_f32(((to_1 + ((uint64_t)weights_at)) + (((uint64_t)entry) * (uint64_t)4)), 0x0p+0f/*0.000000e+00*/);
      entry = ((((int64_t)num_blocks) * (int64_t)3072) + entry);
    }
    bound = (((int64_t)max_tokens) * (int64_t)64);
    entry = (((((int64_t)((int)blockIdx.x)) * (int64_t)3072) + (((int64_t)received) * (int64_t)8)) + ((int64_t)((int)threadIdx.x)));
    while (1) {
      if (!((entry < bound))) { break; }
      ep_put_u8((to_1 + ((uint64_t)(scales_at + entry))), (uchar)0);
      entry = ((((int64_t)num_blocks) * (int64_t)3072) + entry);
    }
    ep_bulk_wait_all();
    ep_fence_sys();
    __syncthreads();
    if (((int)threadIdx.x) == 0) {
      flags[2] = ep_arrive_last((own + (uint64_t)128), ((uint)num_blocks));
    }
    __syncthreads();
    last = flags[2];
    if (last == 1) {
      i_2 = ((int)threadIdx.x);
    }
    if (last == 1) {
      while (1) {
        if (!((i_2 < 8))) { break; }
        ep_store_release_sys(((peers[i_2] + (uint64_t)1920) + (((uint64_t)rank) * (uint64_t)8)), ((epoch << (uint64_t)32) | (uint64_t)0));
        got_1 = ep_wait_tag(((own + (uint64_t)1920) + (((uint64_t)i_2) * (uint64_t)8)), epoch, ((uint64_t)status), 3, i_2, ((uint64_t)timeout_ns));
        if (got_1 < (int64_t)0) {
          flags[0] = 1;
        }
        i_2 = (i_2 + 3072);
      }
    }
    if (last == 1) {
      __syncthreads();
    }
    if (last == 1) {
      int condval_11;
      if ((flags[0] == 0)) {
        condval_11 = 1;
      } else {
        condval_11 = 0;
      }
      arrived = condval_11;
    }
    if (last == 1) {
      if (arrived == 1) {
        if (((int)threadIdx.x) == 0) {
          ep_put_u32((own + (uint64_t)192), (uint)0);
        }
      }
    }
    if (last == 1) {
      if (arrived == 1) {
        if (((int)threadIdx.x) == 0) {
          ep_put_u64(own, epoch);
        }
      }
    }
  }
}

