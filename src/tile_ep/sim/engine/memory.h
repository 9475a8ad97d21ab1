// Global memory: regions, stores that have not landed yet, what a load returns.
#pragma once
#include <cstdlib>

#include "state.h"

// Things that happen later, by kind. The scheduler draws from them; fences and waits force them.
enum Pool : uint8_t { kWeakStores, kReleaseStores, kCopiedStores, kBulkReads, kBulkLoads, kPools };

// 16 bytes of memory. Indices are off by one, 0 is none.
struct Line {
  uint32_t pending;  // stores to it that have not landed, oldest first
  uint32_t watchers;
  uint32_t history;
};

struct Region {
  uint64_t begin, end;
  const char *name;
  uint32_t id;
  Line *lines;  // of the 16-byte units from begin & ~15 on

  Line &line(uint64_t address) const { return lines[(address >> 4) - (begin >> 4)]; }
};

// At most 16 bytes, naturally aligned, so it lies in one line.
struct Store {
  uint64_t address;
  const Region *region;
  Point point;
  uint32_t block;
  uint32_t group;  // of bulk stores
  uint32_t in_pool, next_in_line, next_in_block, previous_in_block;
  int32_t rank;
  uint8_t bytes;
  Pool pool;
  bool adds;         // to what is there, 8 bytes
  bool on_device;    // released to its rank, by an operation of device scope
  uint64_t visible;  // changes of memory when it was
  unsigned char data[16];
};

// What a line held before its latest burst of changes.
struct History {
  unsigned char before[16];
  uint64_t changed;  // number of its latest change
  uint64_t visible;  // the same for the writer's rank, which may have seen it earlier
  uint32_t writer;
};

struct Memory {
  std::vector<Region> regions;  // by address, disjoint
  const Region *cache[256];
  std::vector<Store> stores;
  std::vector<uint32_t> free_stores;
  std::vector<uint32_t> pools[3];  // of stores: weak, release, copied
  std::vector<History> histories;
  uint64_t changes = 0, last_acquire = 0, landed = 0;
  uint32_t any_watchers = 0;
  uint32_t preempt_in = 0, preempt_mean = 64;
  bool stale_loads = false;
};

static Memory memory;

static const char *region_name(const Region &r) { return r.name ? r.name : "unnamed"; }

static const Region *find_region(uint64_t address) {
  size_t low = 0, high = memory.regions.size();
  while (low < high) {
    const size_t middle = (low + high) / 2;
    if (memory.regions[middle].end <= address) low = middle + 1;
    else high = middle;
  }
  return low < memory.regions.size() && memory.regions[low].begin <= address ? &memory.regions[low] : nullptr;
}

// Where an address lies, in words.
static std::string locate(uint64_t address) {
  char text[256];
  const Region *nearest = nullptr;
  uint64_t distance = ~0ull;
  for (const Region &r : memory.regions) {
    const uint64_t away = address < r.begin ? r.begin - address : address >= r.end ? address - r.end + 1 : 0;
    if (away < distance) distance = away, nearest = &r;
  }
  if (nearest == nullptr) {
    snprintf(text, sizeof text, "0x%llx (there are no regions)", static_cast<unsigned long long>(address));
  } else if (distance == 0) {
    snprintf(text, sizeof text, "'%s' + %llu", region_name(*nearest),
             static_cast<unsigned long long>(address - nearest->begin));
  } else {
    snprintf(text, sizeof text, "0x%llx, %llu bytes %s the nearest region '%s' of %llu bytes",
             static_cast<unsigned long long>(address),
             static_cast<unsigned long long>(address < nearest->begin ? distance : distance - 1),
             address < nearest->begin ? "before" : "past the end of", region_name(*nearest),
             static_cast<unsigned long long>(nearest->end - nearest->begin));
  }
  return text;
}

static const Region &check_access(const char *what, uint64_t address, uint32_t bytes, uint32_t alignment) {
  const Region *&cached = memory.cache[address >> 12 & 255];
  const Region *r = cached;
  if (r == nullptr || address < r->begin || address >= r->end) r = find_region(address);
  if (r == nullptr || bytes > r->end - address)
    fail(kMemoryFault, "%s of %u bytes at %s is outside the memory it may touch", what, bytes,
         locate(r ? address + bytes : address).c_str());
  if (address % alignment != 0)
    fail(kMemoryFault, "%s of %u bytes at %s is not aligned to %u", what, bytes, locate(address).c_str(), alignment);
  cached = r;
  return *r;
}

static void preemption_point(Thread &t) {
  ++machine.operations;
  ++machine.now_ns;
  if (--memory.preempt_in != 0) return;
  memory.preempt_in = 1 + machine.random.below(2 * memory.preempt_mean);
  yield_thread(t);
}

// ---------------------------------------------------------------- changes

static void wake(uint32_t &list) {
  for (uint32_t i = list; i != 0;) {
    Thread &t = machine.threads[i - 1];
    i = t.next_watcher;
    make_ready(t);
  }
  list = 0;
}

// Memory changes, now and for everybody. The writer's rank has seen it for `lead` changes.
static void change(const Region &r, uint64_t address, const void *data, uint32_t bytes, uint32_t writer, uint64_t lead) {
  Line &line = r.line(address);
  if (line.history == 0) {
    memory.histories.push_back({{}, 0, 0, writer});
    line.history = static_cast<uint32_t>(memory.histories.size());
  }
  History &h = memory.histories[line.history - 1];
  const uint64_t visible = memory.changes + 1 - lead;
  // Changes by one block, none of which anybody can have acquired yet, are one burst: a stale load sees none of them.
  const bool burst = h.writer == writer && h.visible > memory.last_acquire && visible > memory.last_acquire;
  if (!burst) memcpy(h.before, reinterpret_cast<void *>(address & ~15ull), 16);
  h.writer = writer;
  h.changed = ++memory.changes;
  h.visible = burst && h.visible > visible ? h.visible : visible;
  memcpy(reinterpret_cast<void *>(address), data, bytes);
  ++machine.progress;
  machine.note(uint64_t{r.id} << 40 ^ (address - r.begin));
  if (line.watchers) wake(line.watchers);
  if (memory.any_watchers) wake(memory.any_watchers);
}

// A bulk store whose thread has not waited for it.
static bool in_flight(const Store &s) {
  return s.pool == kCopiedStores && s.group >= machine.threads[s.point.thread].bulk_completed;
}

static void add_store(Thread &t, Pool pool, const Region &r, uint64_t address, const void *data, uint32_t bytes,
                      uint32_t group) {
  uint32_t number;
  if (memory.free_stores.empty()) {
    memory.stores.emplace_back();
    number = static_cast<uint32_t>(memory.stores.size());
  } else {
    number = memory.free_stores.back();
    memory.free_stores.pop_back();
  }
  Store &s = memory.stores[number - 1];
  Block &b = *t.in_block;
  s.address = address, s.region = &r, s.point = point_of(t), s.block = b.id, s.rank = b.rank, s.group = group;
  s.adds = false, s.on_device = false, s.visible = 0;
  s.bytes = static_cast<uint8_t>(bytes), s.pool = pool;
  memcpy(s.data, data, bytes);
  std::vector<uint32_t> &members = memory.pools[pool];
  s.in_pool = static_cast<uint32_t>(members.size());
  members.push_back(number);
  s.next_in_line = 0;
  uint32_t *end = &r.line(address).pending;
  while (*end != 0) end = &memory.stores[*end - 1].next_in_line;
  *end = number;
  s.next_in_block = 0, s.previous_in_block = b.pending_tail;
  (b.pending_tail ? memory.stores[b.pending_tail - 1].next_in_block : b.pending_head) = number;
  b.pending_tail = number;
}

static void remove_store(uint32_t number) {
  Store &s = memory.stores[number - 1];
  Block &b = machine.blocks[s.block];
  std::vector<uint32_t> &members = memory.pools[s.pool];
  members[s.in_pool] = members.back();
  memory.stores[members.back() - 1].in_pool = s.in_pool;
  members.pop_back();
  uint32_t *link = &s.region->line(s.address).pending;
  while (*link != number) link = &memory.stores[*link - 1].next_in_line;
  *link = s.next_in_line;
  (s.previous_in_block ? memory.stores[s.previous_in_block - 1].next_in_block : b.pending_head) = s.next_in_block;
  (s.next_in_block ? memory.stores[s.next_in_block - 1].previous_in_block : b.pending_tail) = s.previous_in_block;
  memory.free_stores.push_back(number);
}

// 64-bit sum, in place.
static void add_to(unsigned char *sum, const void *value) {
  uint64_t a, b;
  memcpy(&a, sum, 8), memcpy(&b, value, 8);
  a += b;
  memcpy(sum, &a, 8);
}

static void apply_store(uint32_t number) {
  Store s = memory.stores[number - 1];
  remove_store(number);
  if (s.adds) add_to(s.data, reinterpret_cast<const void *>(s.address));
  ++memory.landed;
  change(*s.region, s.address, s.data, s.bytes, s.block, s.on_device ? memory.changes + 1 - s.visible : 0);
}

static bool overlap(const Store &a, const Store &b) {
  return a.address < b.address + b.bytes && b.address < a.address + a.bytes;
}

// Lands a store, after the earlier ones to the same bytes that its block made, or that its rank has seen: those keep
// their order.
static void land(uint32_t number) {
  const Store &s = memory.stores[number - 1];
  if (!in_flight(s)) {
    for (uint32_t i = s.region->line(s.address).pending; i != number;) {
      const Store &earlier = memory.stores[i - 1];
      const uint32_t next = earlier.next_in_line;
      const bool before = earlier.block == s.block || (earlier.on_device && earlier.rank == s.rank);
      if (before && overlap(earlier, s) && !in_flight(earlier)) apply_store(i);
      i = next;
    }
  }
  apply_store(number);
}

// Lands what is ordered before the next operation of `t`: its own stores, and those of its block that a barrier put before.
static void land_ordered(const Thread &t) {
  for (uint32_t i = t.in_block->pending_head; i != 0;) {
    const Store &s = memory.stores[i - 1];
    const uint32_t number = i;
    i = s.next_in_block;
    if (!in_flight(s) && ordered(s.point, t)) land(number);
  }
}

// Shows the same to the rank of `t`, but not to others: that takes an operation of system scope by whoever wrote, or by its
// block after a barrier.
static void release_to_device(const Thread &t) {
  for (uint32_t i = t.in_block->pending_head; i != 0; i = memory.stores[i - 1].next_in_block) {
    Store &s = memory.stores[i - 1];
    if (!s.on_device && !in_flight(s) && ordered(s.point, t)) s.on_device = true, s.visible = memory.changes;
  }
}

// Whether `t` sees a store that has not landed.
static bool sees(const Thread &t, const Store &s) {
  if (in_flight(s)) return false;
  return s.block == t.in_block->id ? ordered(s.point, t) || s.on_device : s.on_device && s.rank == t.in_block->rank;
}

// ---------------------------------------------------------------- accesses

static void acquire(Thread &t) { t.acquired = memory.last_acquire = memory.changes; }

// Memory as `t` sees it: what has landed, its own stores, and those that were ordered before or released to its rank.
static void read_memory(const Thread &t, const Region &r, uint64_t address, unsigned char *value, uint32_t bytes,
                        bool may_be_stale) {
  memcpy(value, reinterpret_cast<const void *>(address), bytes);
  const Line &line = r.line(address);
  if (may_be_stale && line.history != 0) {
    const History &h = memory.histories[line.history - 1];
    const uint64_t changed = machine.blocks[h.writer].rank == t.in_block->rank ? h.visible : h.changed;
    if (changed > t.acquired && h.writer != t.in_block->id && machine.random.one_in(2))
      memcpy(value, h.before + (address & 15), bytes);
  }
  for (uint32_t i = line.pending; i != 0; i = memory.stores[i - 1].next_in_line) {
    const Store &s = memory.stores[i - 1];
    if (!sees(t, s)) continue;
    if (s.adds) {
      if (s.address != address || bytes != 8)
        fail(kMisuse, "load of %u bytes at %s, where a 64-bit sum is under way", bytes, locate(address).c_str());
      add_to(value, s.data);
      continue;
    }
    for (uint32_t k = 0; k < s.bytes; ++k)
      if (s.address + k - address < bytes) value[s.address + k - address] = s.data[k];
  }
}

static uint64_t changed_last(uint64_t address) {
  const uint32_t history = find_region(address)->line(address).history;
  return history == 0 ? 0 : memory.histories[history - 1].changed;
}

// The running thread waits for something that another one does: sleeps until a change of what it looked at, unless that has
// changed already. What it watches is a barrier of its block, one flag, or, if neither is known, all of memory.
static void poll(Thread &t) {
  t.clocked = t.read_clock;
  t.read_clock = false;
  if (t.barrier >= 0) {
    uint32_t &list = t.in_block->barriers[static_cast<size_t>(t.barrier)].watchers;
    t.next_watcher = list;
    list = t.id + 1;
    block_thread(t, kPolling);
  } else if ((t.watched ? changed_last(t.watched) : memory.changes) > t.watched_since) {
    yield_thread(t);
  } else {
    uint32_t &list = t.watched ? find_region(t.watched)->line(t.watched).watchers : memory.any_watchers;
    t.next_watcher = list;
    list = t.id + 1;
    block_thread(t, kPolling);
  }
  t.flags_read = 0;
  t.watched = 0;
  t.watched_since = memory.changes;
}

extern "C" void tile_ep_sim_load(uint64_t address, void *value, uint32_t bytes) {
  Thread &t = *machine.current;
  const Region &r = check_access("load", address, bytes, bytes);
  preemption_point(t);
  read_memory(t, r, address, static_cast<unsigned char *>(value), bytes, memory.stale_loads);
}

extern "C" void tile_ep_sim_store(uint64_t address, const void *value, uint32_t bytes) {
  Thread &t = *machine.current;
  const Region &r = check_access("store", address, bytes, bytes);
  preemption_point(t);
  add_store(t, kWeakStores, r, address, value, bytes, 0);
}

extern "C" uint64_t tile_ep_sim_load_acquire(uint64_t address) {
  Thread &t = *machine.current;
  const Region &r = check_access("acquire load", address, 8, 8);
  preemption_point(t);
  uint64_t value;
  constexpr uint32_t kManyFlags = 16;
  for (int attempt = 0;; ++attempt) {
    read_memory(t, r, address, reinterpret_cast<unsigned char *>(&value), 8, false);
    acquire(t);
    const bool again = t.flags_read > 0 && t.watched == address && t.watched_value == value;
    if (attempt > 0 || !(again || t.flags_read > kManyFlags)) break;
    poll(t);
  }
  if (t.flags_read == 0) t.watched_since = memory.changes;
  t.watched = t.flags_read == 0 || t.watched == address ? address : 0;
  t.watched_value = value;
  ++t.flags_read;
  return value;
}

extern "C" void tile_ep_sim_store_release(uint64_t address, uint64_t value) {
  Thread &t = *machine.current;
  const Region &r = check_access("release store", address, 8, 8);
  preemption_point(t);
  land_ordered(t);
  add_store(t, kReleaseStores, r, address, &value, 8, 0);
}

extern "C" void tile_ep_sim_add(uint64_t address, uint64_t value, int32_t release) {
  Thread &t = *machine.current;
  const Region &r = check_access("add", address, 8, 8);
  preemption_point(t);
  if (release) land_ordered(t);
  add_store(t, release ? kReleaseStores : kWeakStores, r, address, &value, 8, 0);
  memory.stores[t.in_block->pending_tail - 1].adds = true;
}

extern "C" uint32_t tile_ep_sim_atomic_add(uint64_t address, uint32_t value, int32_t acq_rel) {
  Thread &t = *machine.current;
  const Region &r = check_access("atomic add", address, 4, 4);
  preemption_point(t);
  if (acq_rel) release_to_device(t);
  for (uint32_t i = r.line(address).pending; i != 0;) {
    const Store &s = memory.stores[i - 1];
    const uint32_t number = i;
    i = s.next_in_line;
    if (sees(t, s)) land(number), i = r.line(address).pending;
  }
  uint32_t old;
  memcpy(&old, reinterpret_cast<const void *>(address), 4);
  const uint32_t sum = old + value;
  change(r, address, &sum, 4, t.in_block->id, 0);
  if (acq_rel) acquire(t);
  return old;
}

extern "C" void tile_ep_sim_fence() {
  Thread &t = *machine.current;
  preemption_point(t);
  land_ordered(t);
  acquire(t);
}

extern "C" uint64_t tile_ep_sim_now_ns() {
  Thread &t = *machine.current;
  preemption_point(t);
  t.read_clock = true;
  return machine.now_ns;
}

extern "C" void tile_ep_sim_pause() {
  Thread &t = *machine.current;
  ++machine.operations;
  poll(t);
}
