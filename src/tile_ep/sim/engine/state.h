// The simulated machine: threads, warps, blocks, who runs, and how a simulation ends in an error.
#pragma once
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

#include "../include/sim_abi.h"
#include "fiber.h"

enum Code : int32_t { kOk, kDeadlock, kMemoryFault, kMisuse, kStepLimit, kResources, kLateStore };

// A sequence of numbers that is the same everywhere: xorshift64*, seeded by splitmix64.
class Random {
 public:
  explicit Random(uint64_t seed = 1) {
    uint64_t z = seed + 0x9e3779b97f4a7c15ull;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ z >> 27) * 0x94d049bb133111ebull;
    state_ = (z ^ z >> 31) | 1;
  }
  uint32_t next() {
    state_ ^= state_ >> 12;
    state_ ^= state_ << 25;
    state_ ^= state_ >> 27;
    return static_cast<uint32_t>(state_ * 0x2545f4914f6cdd1dull >> 32);
  }
  uint32_t below(uint32_t bound) { return static_cast<uint32_t>(uint64_t{next()} * bound >> 32); }
  bool one_in(uint32_t n) { return below(n) == 0; }
  template <typename T, size_t N> T pick(const T (&choices)[N]) { return choices[below(N)]; }

 private:
  uint64_t state_;
};

// A point in the program order of a thread, for deciding whether a later point of another thread is ordered after it.
struct Point {
  uint32_t thread;
  uint32_t block_epoch, warp_epoch;  // barriers of the block, and of the whole warp, passed before
  uint32_t number;                   // among the points of this thread
};

enum State : uint8_t { kQueued, kReady, kInCollective, kInBlockBarrier, kPolling, kDone };

struct Warp;
struct Block;

struct Thread : SimThread {
  Context context;
  Warp *warp;
  Block *in_block;
  uint32_t id, lane;
  State state;

  // In a collective or barrier.
  int32_t line, kind;
  uint32_t mask;
  uint64_t operand, extra, result;

  // Polling.
  uint64_t watched;       // address of the flag read last, 0 when there is none or more than one
  uint64_t watched_value;
  uint64_t watched_since;  // changes of memory when it was read
  uint32_t flags_read;     // since the last pause
  int32_t barrier;         // index of the shared-memory barrier that is waited for, -1 for none
  uint32_t parity;
  bool read_clock, clocked;  // since the last pause; before it
  uint32_t next_watcher;     // thread number + 1

  // A named wait, -1 outside.
  int32_t phase, peer;
  uint64_t epoch;

  // Order of memory.
  uint32_t points;
  uint64_t acquired;  // changes of memory that have been acquired
  uint32_t bulk_groups, bulk_completed, bulk_unread, bulk_uncommitted;
};

struct Rendezvous {
  uint32_t mask, arrived;
  int32_t kind;
  uint32_t width;
};

struct Warp {
  Block *block;
  uint32_t id, index;  // in the machine, in the block
  uint32_t first, ready, live;
  uint32_t epoch;
  int32_t runnable_at;  // place in the list of runnable warps, -1 when not in it
  uint32_t priority;
  std::vector<Rendezvous> open;
  std::vector<uint32_t> known;  // [lane][other lane]: points ordered by barriers of a part of the warp; empty without
};

struct MBarrier {
  uint32_t offset;
  Point initialised;
  bool fenced;
  uint32_t arrivals, pending;
  int64_t transactions;
  uint32_t phase;
  uint32_t watchers;
};

struct Block {
  int32_t rank;
  uint32_t id, rank_index, index;  // in the machine; of its rank among the ranks; within the grid
  uint32_t launch;
  uint32_t first, num_threads, live;
  uint32_t epoch, arrived;
  uint32_t pending_head, pending_tail;  // its stores that have not landed, oldest first
  uint32_t static_bytes, shared_bytes, loads_in_flight;
  unsigned char *shared;
  unsigned char *engine_view;  // shared memory as the copy engine saw it last
  std::vector<uint32_t> view_fence;  // per 16 bytes: fences of the block when the view was brought up to date
  uint32_t async_fences;
  std::vector<MBarrier> barriers;
  std::vector<uint16_t> barrier_at;  // index + 1, by offset / 8
};

struct Failure {};

struct Machine {
  Random random;
  std::vector<Thread> threads;
  std::vector<Warp> warps;
  std::vector<Block> blocks;
  std::vector<uint32_t> runnable;
  Thread *current = nullptr;  // null while the scheduler runs
  Context scheduler;
  bool end_turn = false;
  uint32_t live = 0;
  uint64_t now_ns = 0;
  uint64_t steps = 0, operations = 0;
  uint64_t progress = 0;  // things that happened which a waiting thread may have waited for
  uint64_t trace = 0;
  int32_t code = kOk;
  std::string message;

  void note(uint64_t what) { trace = (trace ^ what) * 0x9e3779b97f4a7c15ull ^ trace >> 29; }
};

static Machine machine;
extern "C" {
SimThread *tile_ep_sim_thread;
}

static std::string describe(const Thread &t) {
  char text[128];
  snprintf(text, sizeof text, "rank %d block %u warp %u lane %u (thread %u)", t.in_block->rank, t.in_block->index,
           t.warp->index, t.lane, t.thread.x);
  return text;
}

// Ends the simulation. On a thread's stack control goes back to the scheduler for good.
[[noreturn]] __attribute__((format(printf, 2, 3))) static void fail(Code code, const char *format, ...) {
  char text[512];
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(text, sizeof text, format, arguments);
  va_end(arguments);
  machine.code = code;
  Thread *t = machine.current;
  machine.message = t ? describe(*t) + ": " + text : std::string(text);
  if (t == nullptr) throw Failure{};
  machine.current = nullptr;
  Context::swap(t->context, machine.scheduler);
  __builtin_unreachable();
}

// ---------------------------------------------------------------- running and waking

static void make_ready(Thread &t) {
  Warp &w = *t.warp;
  t.state = kReady;
  w.ready |= 1u << t.lane;
  if (w.runnable_at < 0) {
    w.runnable_at = static_cast<int32_t>(machine.runnable.size());
    machine.runnable.push_back(w.id);
  }
}

static void remove_if_idle(Warp &w) {
  if (w.ready != 0 || w.runnable_at < 0) return;
  const uint32_t last = machine.runnable.back();
  machine.runnable[static_cast<size_t>(w.runnable_at)] = last;
  machine.warps[last].runnable_at = w.runnable_at;
  machine.runnable.pop_back();
  w.runnable_at = -1;
}

static void leave_to_scheduler(Thread &t) {
  machine.current = nullptr;
  Context::swap(t.context, machine.scheduler);
}

// Stops the running thread until somebody calls make_ready.
static void block_thread(Thread &t, State state) {
  t.state = state;
  t.warp->ready &= ~(1u << t.lane);
  leave_to_scheduler(t);
}

// Lets others go first.
static void yield_thread(Thread &t) {
  machine.end_turn = true;
  leave_to_scheduler(t);
}

// ---------------------------------------------------------------- order

static Point point_of(Thread &t) { return {t.id, t.in_block->epoch, t.warp->epoch, ++t.points}; }

// Whether the next thing that `t` does comes after `p`, by program order and barriers. `p` belongs to a thread of its block.
static bool ordered(const Point &p, const Thread &t) {
  if (p.thread == t.id || p.block_epoch < t.in_block->epoch) return true;
  const Thread &other = machine.threads[p.thread];
  if (other.warp != t.warp) return false;
  if (p.warp_epoch < t.warp->epoch) return true;
  return !t.warp->known.empty() && t.warp->known[t.lane * 32 + other.lane] >= p.number;
}
