// The simulator's device layer: the functions of kernels/device.cuh, one for one, on the engine.
#pragma once
#include "sim_cuda.h"

#define EP_DEVICE static inline

template <typename T> EP_DEVICE T ep_load(uint64_t address) {
  T value;
  tile_ep_sim_load(address, &value, sizeof(T));
  return value;
}
template <typename T> EP_DEVICE void ep_store(uint64_t address, T value) {
  tile_ep_sim_store(address, &value, sizeof(T));
}

EP_DEVICE uint64_t ep_load_acquire_sys(uint64_t address) { return tile_ep_sim_load_acquire(address); }
EP_DEVICE void ep_store_release_sys(uint64_t address, uint64_t value) { tile_ep_sim_store_release(address, value); }
EP_DEVICE uint64_t ep_load_relaxed_sys(uint64_t address) { return ep_load<uint64_t>(address); }
EP_DEVICE void ep_store_relaxed_sys(uint64_t address, uint64_t value) { ep_store<uint64_t>(address, value); }
EP_DEVICE void ep_add_release_sys(uint64_t address, uint64_t value) { tile_ep_sim_add(address, value, 1); }
EP_DEVICE uint32_t ep_atomic_add_acq_rel_gpu(uint64_t address, uint32_t value) {
  return tile_ep_sim_atomic_add(address, value, 1);
}
EP_DEVICE uint32_t ep_atomic_add_relaxed_gpu(uint64_t address, uint32_t value) {
  return tile_ep_sim_atomic_add(address, value, 0);
}
EP_DEVICE void ep_fence_sys() { tile_ep_sim_fence(); }

EP_DEVICE uint32_t ep_shared_address(const void *pointer) { return tile_ep_sim_shared_address(pointer); }
EP_DEVICE void ep_mbarrier_init(uint32_t barrier, uint32_t arrivals) { tile_ep_sim_mbarrier_init(barrier, arrivals); }
EP_DEVICE void ep_mbarrier_init_fence() { tile_ep_sim_mbarrier_init_fence(); }
EP_DEVICE void ep_mbarrier_arrive_expect(uint32_t barrier, uint32_t bytes) {
  tile_ep_sim_mbarrier_arrive_expect(barrier, bytes);
}
EP_DEVICE bool ep_mbarrier_try_wait(uint32_t barrier, uint32_t parity) {
  return tile_ep_sim_mbarrier_try_wait(barrier, parity) != 0;
}
EP_DEVICE void ep_fence_async_shared() { tile_ep_sim_fence_async_shared(); }
EP_DEVICE void ep_fence_async_global() {}  // not modelled

EP_DEVICE void ep_bulk_load(uint32_t shared, uint64_t address, uint32_t bytes, uint32_t barrier) {
  tile_ep_sim_bulk_load(shared, address, bytes, barrier);
}
EP_DEVICE void ep_bulk_store(uint64_t address, uint32_t shared, uint32_t bytes) {
  tile_ep_sim_bulk_store(address, shared, bytes);
}
EP_DEVICE void ep_bulk_store_streamed(uint64_t address, uint32_t shared, uint32_t bytes) {
  ep_bulk_store(address, shared, bytes);
}
EP_DEVICE void ep_bulk_commit() { tile_ep_sim_bulk_commit(); }
template <int N> EP_DEVICE void ep_bulk_wait_read() { tile_ep_sim_bulk_wait_read(N); }
EP_DEVICE void ep_bulk_wait_all() { tile_ep_sim_bulk_wait_all(); }

EP_DEVICE uint64_t ep_now_ns() { return tile_ep_sim_now_ns(); }
EP_DEVICE void ep_pause() { tile_ep_sim_pause(); }

// The leaf `ep_wait_tag` gets another name while primitives.cuh is read; sim_waits.h, which the generated includes pull in
// after it, wraps it under its own, so that reports can say what a thread waits for.
#define ep_wait_tag ep_wait_tag_unnamed
