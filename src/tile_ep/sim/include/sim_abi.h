// What a simulated kernel and the engine know of each other. The engine defines it, kernels are linked to it when loaded.
#pragma once
#include <cstdint>

struct SimDim {
  uint32_t x, y, z;
};

// The running thread, as far as generated code may look.
struct SimThread {
  SimDim thread, block, block_dim, grid_dim;
  unsigned char *static_shared;
  unsigned char *dynamic_shared;
};

enum SimCollective : int32_t {
  kSyncWarp,
  kShfl,
  kShflUp,
  kShflDown,
  kShflXor,
  kMatchAny,
  kMatchAll,
  kBallot,
};

extern "C" {
extern SimThread *tile_ep_sim_thread;

// Warp collectives: waits for the lanes of `mask`. `operand` is the lane's contribution, `extra` the source lane, distance
// or lane mask of a shuffle with the segment width in its upper half, `line` where it stands in the generated source.
uint64_t tile_ep_sim_collective(int32_t kind, uint32_t mask, uint64_t operand, uint64_t extra, int32_t line);
void tile_ep_sim_sync_block(int32_t line);

void tile_ep_sim_load(uint64_t address, void *value, uint32_t bytes);
void tile_ep_sim_store(uint64_t address, const void *value, uint32_t bytes);
uint64_t tile_ep_sim_load_acquire(uint64_t address);
void tile_ep_sim_store_release(uint64_t address, uint64_t value);
void tile_ep_sim_add(uint64_t address, uint64_t value, int32_t release);
uint32_t tile_ep_sim_atomic_add(uint64_t address, uint32_t value, int32_t acq_rel);
void tile_ep_sim_fence();

uint32_t tile_ep_sim_shared_address(const void *pointer);
void tile_ep_sim_mbarrier_init(uint32_t barrier, uint32_t arrivals);
void tile_ep_sim_mbarrier_init_fence();
void tile_ep_sim_mbarrier_arrive_expect(uint32_t barrier, uint32_t bytes);
int32_t tile_ep_sim_mbarrier_try_wait(uint32_t barrier, uint32_t parity);
void tile_ep_sim_fence_async_shared();
void tile_ep_sim_bulk_load(uint32_t shared, uint64_t address, uint32_t bytes, uint32_t barrier);
void tile_ep_sim_bulk_store(uint64_t address, uint32_t shared, uint32_t bytes);
void tile_ep_sim_bulk_commit();
void tile_ep_sim_bulk_wait_read(uint32_t groups);
void tile_ep_sim_bulk_wait_all();

uint64_t tile_ep_sim_now_ns();
void tile_ep_sim_pause();
[[noreturn]] void tile_ep_sim_trap(const char *what);

// Around a named wait, for the reports: what it waits for; then its result, negative when it gave up.
void tile_ep_sim_wait_begin(int32_t phase, int32_t peer, uint64_t epoch);
void tile_ep_sim_wait_end(int64_t result);
}
