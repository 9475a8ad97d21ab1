// Shared memory as the copy engine uses it: barriers with transaction counts, bulk loads, bulk stores.
#pragma once
#include "memory.h"

struct BulkRead {  // of shared memory, for a store
  uint64_t address;
  uint32_t thread, shared, bytes, group;
};

struct BulkLoad {
  uint64_t address;
  uint32_t thread, shared, bytes, barrier;
  std::vector<unsigned char> data;  // read when it was issued; empty: will be read when it lands
};

struct CopyEngine {
  std::vector<BulkRead> reads;
  std::vector<BulkLoad> loads;
  uint64_t fetched_bytes = 0;  // by all loads so far
  bool may_read_early = true;
};

static CopyEngine copies;

static uint64_t signature(uint32_t offset) { return 0x6d62617272696572ull ^ offset; }

static void check_shared(const char *what, const Block &b, uint32_t offset, uint32_t bytes, uint32_t alignment) {
  if (offset > b.shared_bytes || bytes > b.shared_bytes - offset)
    fail(kMemoryFault, "%s of %u bytes at shared offset %u exceeds the block's %u bytes", what, bytes, offset,
         b.shared_bytes);
  if (offset % alignment != 0)
    fail(kMemoryFault, "%s at shared offset %u is not aligned to %u", what, offset, alignment);
}

static void check_bulk(const char *what, const Block &b, uint32_t shared, uint32_t bytes) {
  if (bytes == 0 || bytes % 16 != 0) fail(kMemoryFault, "%s of %u bytes, not a positive multiple of 16", what, bytes);
  check_shared(what, b, shared, bytes, 16);
}

extern "C" uint32_t tile_ep_sim_shared_address(const void *pointer) {
  const Thread &t = *machine.current;
  const uint64_t offset = reinterpret_cast<uint64_t>(pointer) - reinterpret_cast<uint64_t>(t.in_block->shared);
  if (offset >= t.in_block->shared_bytes)
    fail(kMemoryFault, "a pointer outside the block's %u bytes of shared memory is used as a shared address",
         t.in_block->shared_bytes);
  return static_cast<uint32_t>(offset);
}

// ---------------------------------------------------------------- barriers

extern "C" void tile_ep_sim_mbarrier_init(uint32_t offset, uint32_t arrivals) {
  Thread &t = *machine.current;
  Block &b = *t.in_block;
  check_shared("mbarrier.init", b, offset, 8, 8);
  if (arrivals == 0) fail(kMisuse, "mbarrier.init at shared offset %u for 0 arrivals", offset);
  if (b.barrier_at.empty()) b.barrier_at.assign(b.shared_bytes / 8 + 1, 0);
  uint16_t &at = b.barrier_at[offset / 8];
  if (at == 0) {
    b.barriers.emplace_back();
    at = static_cast<uint16_t>(b.barriers.size());
  } else if (b.barriers[at - 1u].transactions != 0) {
    fail(kMisuse, "mbarrier.init at shared offset %u while bytes are under way to it", offset);
  }
  b.barriers[at - 1u] = {offset, point_of(t), false, arrivals, arrivals, 0, 0, 0};
  const uint64_t word = signature(offset);
  memcpy(b.shared + offset, &word, 8);
}

extern "C" void tile_ep_sim_mbarrier_init_fence() {
  const Thread &t = *machine.current;
  for (MBarrier &barrier : t.in_block->barriers)
    if (ordered(barrier.initialised, t)) barrier.fenced = true;
}

static void check_intact(const char *what, const Block &b, const MBarrier &barrier) {
  const uint64_t word = signature(barrier.offset);
  if (memcmp(b.shared + barrier.offset, &word, 8) != 0)
    fail(kMisuse, "%s at shared offset %u: something overwrote the barrier", what, barrier.offset);
}

static uint32_t use_barrier(const char *what, const Thread &t, uint32_t offset) {
  const Block &b = *t.in_block;
  check_shared(what, b, offset, 8, 8);
  const uint16_t at = b.barrier_at.empty() ? 0 : b.barrier_at[offset / 8];
  if (at == 0) fail(kMisuse, "%s at shared offset %u: the barrier is not initialised", what, offset);
  const MBarrier &barrier = b.barriers[at - 1u];
  if (!barrier.fenced) fail(kMisuse, "%s at shared offset %u: the barrier was initialised without a fence", what, offset);
  if (!ordered(barrier.initialised, t))
    fail(kMisuse, "%s at shared offset %u: not synchronised with the barrier's initialisation", what, offset);
  check_intact(what, b, barrier);
  return at - 1u;
}

static void complete_phase_if_due(MBarrier &barrier) {
  if (barrier.pending != 0 || barrier.transactions != 0) return;
  ++barrier.phase;
  barrier.pending = barrier.arrivals;
  ++machine.progress;
  wake(barrier.watchers);
}

extern "C" void tile_ep_sim_mbarrier_arrive_expect(uint32_t offset, uint32_t bytes) {
  Thread &t = *machine.current;
  preemption_point(t);
  MBarrier &barrier = t.in_block->barriers[use_barrier("mbarrier.arrive", t, offset)];
  if (barrier.pending == 0)
    fail(kMisuse, "mbarrier.arrive at shared offset %u: more arrivals than the %u of a phase", offset,
         barrier.arrivals);
  barrier.transactions += bytes;
  --barrier.pending;
  complete_phase_if_due(barrier);
}

extern "C" int32_t tile_ep_sim_mbarrier_try_wait(uint32_t offset, uint32_t parity) {
  Thread &t = *machine.current;
  preemption_point(t);
  const uint32_t at = use_barrier("mbarrier.try_wait", t, offset);
  if (parity > 1) fail(kMisuse, "mbarrier.try_wait at shared offset %u: parity %u", offset, parity);
  if ((t.in_block->barriers[at].phase & 1) != parity) return 1;
  t.barrier = static_cast<int32_t>(at);
  t.parity = parity;
  poll(t);
  t.barrier = -1;
  return (t.in_block->barriers[at].phase & 1) != parity;
}

// ---------------------------------------------------------------- bulk loads

static void read_global(uint64_t address, unsigned char *data, uint32_t bytes) {
  memcpy(data, reinterpret_cast<const void *>(address), bytes);
}

static void update_view(Block &b, uint32_t shared, uint32_t bytes) {
  memcpy(b.engine_view + shared, b.shared + shared, bytes);
  for (uint32_t i = shared / 16; i < (shared + bytes) / 16; ++i) b.view_fence[i] = b.async_fences;
}

// Writes shared memory and counts the bytes in.
static void land_load(size_t at) {
  const BulkLoad load = std::move(copies.loads[at]);
  copies.loads[at] = std::move(copies.loads.back());
  copies.loads.pop_back();
  Block &b = *machine.threads[load.thread].in_block;
  if (load.data.empty()) read_global(load.address, b.shared + load.shared, load.bytes);
  else memcpy(b.shared + load.shared, load.data.data(), load.bytes);
  update_view(b, load.shared, load.bytes);
  --b.loads_in_flight;
  MBarrier &barrier = b.barriers[load.barrier];
  check_intact("bulk load", b, barrier);
  barrier.transactions -= load.bytes;
  machine.note(load.shared);
  ++machine.progress;
  complete_phase_if_due(barrier);
}

extern "C" void tile_ep_sim_bulk_load(uint32_t shared, uint64_t address, uint32_t bytes, uint32_t offset) {
  Thread &t = *machine.current;
  Block &b = *t.in_block;
  check_bulk("bulk load", b, shared, bytes);
  check_access("bulk load", address, bytes, 16);
  const uint32_t barrier = use_barrier("bulk load", t, offset);
  preemption_point(t);
  BulkLoad load{address, t.id, shared, bytes, barrier, {}};
  if (copies.may_read_early && machine.random.one_in(2)) {
    load.data.resize(bytes);
    read_global(address, load.data.data(), bytes);
  }
  copies.loads.push_back(std::move(load));
  copies.fetched_bytes += bytes;
  ++b.loads_in_flight;
}

// ---------------------------------------------------------------- bulk stores

// Reads the source; the bytes then land piece by piece.
static void read_source(size_t at) {
  const BulkRead read = copies.reads[at];
  copies.reads[at] = copies.reads.back();
  copies.reads.pop_back();
  Thread &t = machine.threads[read.thread];
  const Region &r = *find_region(read.address);
  for (uint32_t i = 0; i < read.bytes; i += 16)
    add_store(t, kCopiedStores, r, read.address + i, t.in_block->shared + read.shared + i, 16, read.group);
  --t.bulk_unread;
  machine.note(read.shared);
}

static void read_sources(const Thread &t, uint32_t before_group) {
  if (t.bulk_unread == 0) return;
  for (size_t i = copies.reads.size(); i-- > 0;)
    if (copies.reads[i].thread == t.id && copies.reads[i].group < before_group) read_source(i);
}

// The copy engine sees what threads wrote to shared memory only after a fence.
static void check_view(Block &b, uint32_t shared, uint32_t bytes) {
  for (uint32_t i = shared / 16; i < (shared + bytes) / 16; ++i) {
    if (memcmp(b.shared + i * 16, b.engine_view + i * 16, 16) == 0) continue;
    if (b.view_fence[i] == b.async_fences)
      fail(kMisuse, "bulk store from shared offset %u: written by threads with no fence towards the copy engine since",
           i * 16);
    update_view(b, i * 16, 16);
  }
}

extern "C" void tile_ep_sim_bulk_store(uint64_t address, uint32_t shared, uint32_t bytes) {
  Thread &t = *machine.current;
  check_bulk("bulk store", *t.in_block, shared, bytes);
  check_access("bulk store", address, bytes, 16);
  preemption_point(t);
  check_view(*t.in_block, shared, bytes);
  copies.reads.push_back({address, t.id, shared, bytes, t.bulk_groups});
  ++t.bulk_unread;
  ++t.bulk_uncommitted;
  if (copies.may_read_early && machine.random.one_in(4)) read_source(copies.reads.size() - 1);
}

extern "C" void tile_ep_sim_bulk_commit() {
  Thread &t = *machine.current;
  ++t.bulk_groups;
  t.bulk_uncommitted = 0;
}

extern "C" void tile_ep_sim_bulk_wait_read(uint32_t groups) {
  Thread &t = *machine.current;
  preemption_point(t);
  if (t.bulk_groups > groups) read_sources(t, t.bulk_groups - groups);
}

extern "C" void tile_ep_sim_bulk_wait_all() {
  Thread &t = *machine.current;
  preemption_point(t);
  if (t.bulk_uncommitted) fail(kMisuse, "bulk wait_all with %u uncommitted bulk stores", t.bulk_uncommitted);
  read_sources(t, t.bulk_groups);
  if (t.bulk_completed == t.bulk_groups) return;
  // From here on they are stores of this thread, in program order at this point.
  for (uint32_t i = t.in_block->pending_head; i != 0; i = memory.stores[i - 1].next_in_block) {
    Store &s = memory.stores[i - 1];
    if (s.point.thread == t.id && in_flight(s)) s.point = point_of(t);
  }
  t.bulk_completed = t.bulk_groups;
}

extern "C" void tile_ep_sim_fence_async_shared() { ++machine.current->in_block->async_fences; }

// What a thread must not leave behind.
static void check_exit(const Thread &t) {
  if (t.bulk_uncommitted) fail(kMisuse, "the thread ends with %u uncommitted bulk stores", t.bulk_uncommitted);
  if (t.bulk_unread) fail(kMisuse, "the thread ends while %u of its bulk stores still read shared memory", t.bulk_unread);
  if (t.in_block->live == 1 && t.in_block->loads_in_flight)
    fail(kMisuse, "the block ends while %u bulk loads still write its shared memory", t.in_block->loads_in_flight);
}
