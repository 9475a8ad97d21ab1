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
// Words that are complete in themselves: seen whole, in no order with anything else.
EP_DEVICE uint64_t ep_load_relaxed_sys(uint64_t address) {
  uint64_t value;
  asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(address) : "memory");
  return value;
}
EP_DEVICE void ep_store_relaxed_sys(uint64_t address, uint64_t value) {
  asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(address), "l"(value) : "memory");
}
EP_DEVICE void ep_add_release_sys(uint64_t address, uint64_t value) {
  asm volatile("red.release.sys.global.add.u64 [%0], %1;" ::"l"(address), "l"(value) : "memory");
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
// The same for global memory: what this thread wrote or has been shown comes before later accesses of the copy engine, and
// what it wrote before those of copy engines elsewhere that are told to go on.
EP_DEVICE void ep_fence_async_global() { asm volatile("fence.proxy.async.global;" ::: "memory"); }

// -- bulk copies: 16-byte aligned addresses and sizes; loads complete on a barrier, stores in groups.
EP_DEVICE void ep_bulk_load(uint32_t shared, uint64_t address, uint32_t bytes, uint32_t barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(shared),
               "l"(address), "r"(bytes), "r"(barrier) : "memory");
}
EP_DEVICE void ep_bulk_store(uint64_t address, uint32_t shared, uint32_t bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(address), "r"(shared), "r"(bytes)
               : "memory");
}
// The same for what is not read again soon: first to leave the L2 cache.
EP_DEVICE void ep_bulk_store_streamed(uint64_t address, uint32_t shared, uint32_t bytes) {
  constexpr uint64_t kEvictFirst = 0x12F0000000000000ull;  // as `createpolicy.fractional.L2::evict_first` makes it
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group.L2::cache_hint [%0], [%1], %2, %3;" ::"l"(address),
               "r"(shared), "r"(bytes), "l"(kEvictFirst) : "memory");
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
