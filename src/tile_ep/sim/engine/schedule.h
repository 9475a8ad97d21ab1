// Who runs next, what lands when, and what happens when nobody can go on.
#pragma once
#include <algorithm>

#include "collective.h"
#include "shared.h"

enum Schedule : int32_t {
  kUniform,
  kFavourRank,
  kFavourBlock,
  kStarveRank,
  kStarveBlock,
  kStarveWarp,
  kRoundRobin,
  kPriorities,
  kSchedules
};
static const char *const kScheduleNames[] = {"uniform",      "favour rank", "favour block", "starve rank",
                                             "starve block", "starve warp", "round robin",  "priorities"};
static const char *const kPoolNames[] = {"stores", "flags", "copies", "copy reads", "copy loads"};

enum LaneOrder : uint32_t { kAscending, kDescending, kRotated, kLaneOrders };

// How a seed behaves. Uniform randomness alone finds few races: most are found by extremes.
struct Style {
  Schedule schedule;
  uint32_t victim;  // index of a rank, block or warp
  uint32_t passes;  // over the lanes of a warp in a turn
  LaneOrder lanes;
  uint32_t delay[kPools];   // mean number of turns until something lands; 0: only when forced or when all wait
  uint32_t weight[kPools];  // for the choice when all wait
  int32_t late_rank;        // index of a rank whose stores land later than the others', or -1
};

struct Scheduler {
  Style style;
  uint32_t num_ranks = 0, last_warp = 0, next_priority = 0;
  uint64_t jump_ns = 0, idle_progress = ~0ull;
  uint32_t idle_rounds = 0;
  std::string waiting, stalled;  // at the latest halt; when time first had to leap
};

static Scheduler scheduler;
static constexpr uint64_t kFirstJumpNs = 1000;
static constexpr uint32_t kHopelessRounds = 64;

static Style draw_style(int32_t schedule) {
  Random &random = machine.random;
  Style s{};
  const uint32_t drawn = random.below(kSchedules);
  s.schedule = static_cast<Schedule>(schedule >= 0 ? schedule : static_cast<int32_t>(drawn));
  const bool rank = s.schedule == kFavourRank || s.schedule == kStarveRank;
  const uint32_t victims = rank ? scheduler.num_ranks
                                : static_cast<uint32_t>(s.schedule == kStarveWarp ? machine.warps.size()
                                                                                   : machine.blocks.size());
  s.victim = random.below(victims);
  s.passes = random.pick({1u, 4u, 64u});
  s.lanes = static_cast<LaneOrder>(random.below(kLaneOrders));
  for (uint32_t p = 0; p < kPools; ++p) {
    s.delay[p] = random.pick({0u, 1u, 4u, 32u, 256u});
    s.weight[p] = random.pick({1u, 16u});
  }
  s.late_rank = random.one_in(3) ? static_cast<int32_t>(random.below(scheduler.num_ranks)) : -1;
  memory.preempt_mean = random.pick({8u, 64u, 512u, 2048u});
  memory.preempt_in = 1 + random.below(2 * memory.preempt_mean);
  memory.stale_loads = memory.stale_loads && random.one_in(2);
  copies.may_read_early = random.one_in(2);
  return s;
}

static std::string describe_style(const Style &s) {
  std::string text = kScheduleNames[s.schedule];
  if (s.schedule != kUniform && s.schedule != kRoundRobin && s.schedule != kPriorities)
    text += " " + std::to_string(s.victim);
  text += ", " + std::to_string(s.passes) + " passes, preempts every " + std::to_string(memory.preempt_mean) + "; lands";
  for (uint32_t p = 0; p < kPools; ++p)
    text += std::string(p ? ", " : " ") + kPoolNames[p] + " " + (s.delay[p] ? std::to_string(s.delay[p]) : "when forced");
  if (s.late_rank >= 0) text += "; stores of rank " + std::to_string(s.late_rank) + " late";
  if (memory.stale_loads) text += "; stale loads";
  return text;
}

// ---------------------------------------------------------------- landing

static size_t pool_size(Pool pool) {
  if (pool == kBulkReads) return copies.reads.size();
  if (pool == kBulkLoads) return copies.loads.size();
  return memory.pools[pool].size();
}

static void land_one(Pool pool, bool spare_late) {
  const uint32_t at = machine.random.below(static_cast<uint32_t>(pool_size(pool)));
  if (pool == kBulkReads) return read_source(at);
  if (pool == kBulkLoads) return land_load(at);
  const uint32_t number = memory.pools[pool][at];
  const Block &writer = machine.blocks[memory.stores[number - 1].block];
  if (spare_late && static_cast<int32_t>(writer.rank_index) == scheduler.style.late_rank && !machine.random.one_in(16))
    return;
  land(number);
}

static void land_some() {
  for (uint32_t p = 0; p < kPools; ++p) {
    const Pool pool = static_cast<Pool>(p);
    const uint32_t delay = scheduler.style.delay[p];
    const size_t size = pool_size(pool);
    if (delay == 0 || size == 0) continue;
    const uint32_t count = static_cast<uint32_t>((size + machine.random.below(delay)) / delay);
    for (uint32_t i = 0; i < count && pool_size(pool) != 0; ++i) land_one(pool, true);
  }
}

// Lands one thing of any kind. False when there is nothing.
static bool land_any() {
  uint32_t total = 0;
  for (uint32_t p = 0; p < kPools; ++p) total += pool_size(static_cast<Pool>(p)) ? scheduler.style.weight[p] : 0;
  if (total == 0) return false;
  uint32_t at = machine.random.below(total);
  for (uint32_t p = 0; p < kPools; ++p) {
    const uint32_t weight = pool_size(static_cast<Pool>(p)) ? scheduler.style.weight[p] : 0;
    if (at < weight) {
      land_one(static_cast<Pool>(p), false);
      return true;
    }
    at -= weight;
  }
  return false;
}

// ---------------------------------------------------------------- reports

static std::string waiting_for(const Thread &t) {
  std::string text;
  if (t.phase >= 0) {
    text = "phase " + std::to_string(t.phase) + " waiting for peer " + std::to_string(t.peer) + ", epoch " +
           std::to_string(t.epoch) + ": ";
  }
  char detail[256];
  switch (t.state) {
    case kInCollective: {
      uint32_t arrived = 0;
      for (const Rendezvous &r : t.warp->open)
        if (r.mask == t.mask) arrived = r.arrived;
      snprintf(detail, sizeof detail, "%s at line %d, mask %08x, of which lanes %08x have not come", kCollectiveNames[t.kind],
               t.line, t.mask, t.mask & ~arrived & t.warp->live);
      return text + detail;
    }
    case kInBlockBarrier:
      snprintf(detail, sizeof detail, "__syncthreads at line %d, %u of %u threads have come", t.line, t.in_block->arrived,
               t.in_block->live);
      return text + detail;
    case kPolling: break;
    default: return text + "running";
  }
  if (t.barrier >= 0) {
    const MBarrier &b = t.in_block->barriers[static_cast<size_t>(t.barrier)];
    snprintf(detail, sizeof detail,
             "mbarrier at shared offset %u, parity %u: in phase %u, %u arrivals and %lld bytes missing", b.offset, t.parity,
             b.phase, b.pending, static_cast<long long>(b.transactions));
    return text + detail;
  }
  if (t.watched == 0) return text + "pausing, no flag known";
  uint64_t value;
  memcpy(&value, reinterpret_cast<const void *>(t.watched), 8);
  snprintf(detail, sizeof detail, "polls %s, which holds 0x%llx", locate(t.watched).c_str(),
           static_cast<unsigned long long>(value));
  return text + detail;
}

// One line for each group of lanes of a warp that wait for the same thing.
static std::string describe_waiting() {
  std::string text;
  for (const Warp &w : machine.warps) {
    uint32_t left = w.live;  // none of a launch that has not started
    while (left != 0) {
      const Thread &t = machine.threads[w.first + static_cast<uint32_t>(__builtin_ctz(left))];
      const std::string what = waiting_for(t);
      uint32_t lanes = 0;
      for (uint32_t i = 0; i < 32; ++i)
        if (left >> i & 1 && waiting_for(machine.threads[w.first + i]) == what) lanes |= 1u << i;
      left &= ~lanes;
      char who[96];
      snprintf(who, sizeof who, "rank %d block %u warp %u lanes %08x: ", w.block->rank, w.block->index, w.index, lanes);
      text += who + what + "\n";
      if (text.size() > 12000) return text + "...\n";
    }
  }
  return text;
}

// ---------------------------------------------------------------- choosing

static bool is_victim(const Warp &w) {
  switch (scheduler.style.schedule) {
    case kFavourRank:
    case kStarveRank: return w.block->rank_index == scheduler.style.victim;
    case kFavourBlock:
    case kStarveBlock: return w.block->id == scheduler.style.victim;
    default: return w.id == scheduler.style.victim;
  }
}

// The first runnable warp, from a random one on, that is (or is not) the victim's; any if there is none.
static Warp &pick_by_victim(bool victim) {
  const std::vector<uint32_t> &runnable = machine.runnable;
  const uint32_t size = static_cast<uint32_t>(runnable.size()), start = machine.random.below(size);
  for (uint32_t i = 0; i < size; ++i) {
    Warp &w = machine.warps[runnable[(start + i) % size]];
    if (is_victim(w) == victim) return w;
  }
  return machine.warps[runnable[start]];
}

static Warp &pick_warp() {
  Random &random = machine.random;
  const std::vector<uint32_t> &runnable = machine.runnable;
  switch (scheduler.style.schedule) {
    case kFavourRank:
    case kFavourBlock:
      if (!random.one_in(16)) return pick_by_victim(true);
      break;
    case kStarveRank:
    case kStarveBlock:
    case kStarveWarp: return pick_by_victim(false);
    case kRoundRobin: {
      uint32_t best = ~0u, lowest = ~0u;
      for (uint32_t id : runnable) {
        lowest = std::min(lowest, id);
        if (id > scheduler.last_warp) best = std::min(best, id);
      }
      scheduler.last_warp = best != ~0u ? best : lowest;
      return machine.warps[scheduler.last_warp];
    }
    case kPriorities: {
      Warp *best = &machine.warps[runnable[0]];
      for (uint32_t id : runnable)
        if (machine.warps[id].priority < best->priority) best = &machine.warps[id];
      if (random.one_in(32)) best->priority = ++scheduler.next_priority;
      return *best;
    }
    default: break;
  }
  return machine.warps[runnable[random.below(static_cast<uint32_t>(runnable.size()))]];
}

static void resume(Thread &t) {
  ++machine.steps;
  ++machine.now_ns;
  machine.note(t.id);
  machine.current = &t;
  tile_ep_sim_thread = &t;
  Context::swap(machine.scheduler, t.context);
  if (machine.code != kOk) throw Failure{};
}

// A few passes over the lanes that can run; preemption ends the turn.
static void run_turn(Warp &w) {
  machine.end_turn = false;
  for (uint32_t pass = 0; pass < scheduler.style.passes && w.ready != 0; ++pass) {
    uint32_t todo = w.ready;
    const uint32_t start = scheduler.style.lanes == kRotated ? machine.random.below(32) : 0;
    while (todo != 0) {
      const uint32_t from_start = todo & (~0u << start);
      const uint32_t lane = scheduler.style.lanes == kDescending
                                ? 31 - static_cast<uint32_t>(__builtin_clz(todo))
                                : static_cast<uint32_t>(__builtin_ctz(from_start ? from_start : todo));
      todo &= ~(1u << lane);
      resume(machine.threads[w.first + lane]);
      if (machine.end_turn) return;
    }
  }
}

// ---------------------------------------------------------------- when everybody waits

static uint32_t wake_pollers(bool &clocked) {
  uint32_t woken = 0;
  memory.any_watchers = 0;
  for (Block &b : machine.blocks)
    for (MBarrier &barrier : b.barriers) barrier.watchers = 0;
  for (Thread &t : machine.threads) {
    if (t.state != kPolling) continue;
    if (t.watched) find_region(t.watched)->line(t.watched).watchers = 0;
    clocked = clocked || t.clocked;
    make_ready(t);
    ++woken;
  }
  return woken;
}

// Nothing can run. What is under way lands, one thing at a time; then, if somebody looks at the clock, time passes, in
// leaps that double; otherwise those who poll get a few more looks, and then it is a deadlock.
static void idle() {
  if (land_any()) return;
  if (machine.progress != scheduler.idle_progress) {
    scheduler.idle_progress = machine.progress;
    scheduler.idle_rounds = 0;
    scheduler.jump_ns = kFirstJumpNs;
    scheduler.waiting = describe_waiting();
  }
  bool clocked = false;
  const uint32_t woken = wake_pollers(clocked);
  if (clocked) {
    if (scheduler.stalled.empty()) scheduler.stalled = scheduler.waiting;
    machine.now_ns += scheduler.jump_ns;
    scheduler.jump_ns += scheduler.jump_ns < 1ull << 60 ? scheduler.jump_ns : 0;
  }
  ++scheduler.idle_rounds;
  if (woken != 0 && (clocked || scheduler.idle_rounds < kHopelessRounds)) return;
  machine.message = "deadlock: nothing is under way and nobody can go on\n" + scheduler.waiting;
  machine.code = kDeadlock;
  throw Failure{};
}
