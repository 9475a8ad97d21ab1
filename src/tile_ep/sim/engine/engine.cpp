// The simulation engine: runs kernels compiled against include/ on all ranks, in one thread, from a seed.
#include <csetjmp>
#include <csignal>
#include <pthread.h>

#include "schedule.h"

extern "C" {

struct SimLaunch {
  int32_t rank, num_blocks, num_threads;
  uint32_t static_shared, dynamic_shared;
  void (*entry)(const uint64_t *);
  const uint64_t *arguments;
  uint64_t inbox, inbox_bytes;  // memory that peers fill while the launch runs
};

struct SimRegion {
  uint64_t address, bytes;
  const char *name;
};

struct SimSettings {
  uint64_t seed, max_steps;
  int32_t schedule;  // -1: drawn from the seed
  int32_t stale_loads, poison_shared;
};

struct SimExpired {
  int32_t rank, block, thread, phase, peer;
  uint64_t epoch;
};

struct SimResult {
  int32_t code;
  uint32_t num_expired;
  uint64_t steps, operations, landed, fetched_bytes, simulated_ns, trace;
  char style[512];
  char message[16384];
  char stalled[16384];
  SimExpired expired[256];
};
}

// A launch while it waits or runs. Launches of one rank run one after the other, as on a stream.
struct Running {
  const SimLaunch *launch;
  uint32_t rank_index, first_block, live;  // threads
  size_t first_stack, shared_at;           // of the rank: its launches share them
  Running *next;                           // of the rank
  uint32_t number;                         // among the launches of the rank
  bool gave_up;                            // a wait of it, or of an earlier launch of the rank
};

static Stacks stacks;
static SimResult *result;
static std::vector<Running> running;
static std::vector<unsigned char> shared_memory;
static bool poison_shared;

static size_t padded(size_t bytes) { return (bytes + 1023) / 1024 * 1024; }

extern "C" void tile_ep_sim_trap(const char *what) { fail(kMisuse, "%s", what); }

extern "C" void tile_ep_sim_wait_begin(int32_t phase, int32_t peer, uint64_t epoch) {
  Thread &t = *machine.current;
  t.phase = phase, t.peer = peer, t.epoch = epoch;
}

extern "C" void tile_ep_sim_wait_end(int64_t value) {
  Thread &t = *machine.current;
  if (value < 0) running[t.in_block->launch].gave_up = true;
  if (value < 0 && result->num_expired < 256) {
    result->expired[result->num_expired++] = {
        t.in_block->rank, static_cast<int32_t>(t.in_block->index), static_cast<int32_t>(t.thread.x), t.phase, t.peer,
        t.epoch};
  }
  t.phase = -1;
}

static void thread_main() {
  Thread &t = *machine.current;
  Running &r = running[t.in_block->launch];
  r.launch->entry(r.launch->arguments);
  check_exit(t);
  ++machine.progress;
  --machine.live;
  t.state = kDone;
  t.warp->ready &= ~(1u << t.lane);
  count_out(t);
  --r.live;
  leave_to_scheduler(t);
}

// ---------------------------------------------------------------- setting up

static void add_block(Running &r, uint32_t index) {
  const SimLaunch &launch = *r.launch;
  const uint32_t num_threads = static_cast<uint32_t>(launch.num_threads);
  Block b{};
  b.rank = launch.rank, b.rank_index = r.rank_index, b.index = index;
  b.launch = static_cast<uint32_t>(&r - running.data());
  b.id = static_cast<uint32_t>(machine.blocks.size());
  b.first = static_cast<uint32_t>(machine.threads.size());
  b.num_threads = b.live = num_threads;
  b.static_bytes = static_cast<uint32_t>(padded(launch.static_shared));
  b.shared_bytes = b.static_bytes + (launch.dynamic_shared + 15) / 16 * 16;
  machine.blocks.push_back(std::move(b));
  for (uint32_t i = 0; i < num_threads; ++i) {
    if (i % 32 == 0) {
      Warp w{};
      w.id = static_cast<uint32_t>(machine.warps.size());
      w.index = i / 32;
      w.first = static_cast<uint32_t>(machine.threads.size());
      w.runnable_at = -1;
      machine.warps.push_back(std::move(w));
    }
    Thread t{};
    t.id = static_cast<uint32_t>(machine.threads.size());
    t.lane = i % 32;
    t.thread = {i, 0, 0};
    t.block = {index, 0, 0};
    t.block_dim = {num_threads, 1, 1};
    t.grid_dim = {static_cast<uint32_t>(launch.num_blocks), 1, 1};
    t.barrier = t.phase = -1;
    machine.threads.push_back(t);
  }
}

// Lines up the launches of each rank, which get the stacks and the shared memory of its largest one.
static void add_launches(const SimLaunch *launches, int32_t num_launches) {
  struct Rank {
    Running *latest;
    size_t num_threads, shared_bytes;
  };
  std::vector<Rank> ranks;
  running.reserve(static_cast<size_t>(num_launches));
  for (int32_t i = 0; i < num_launches; ++i) {
    const SimLaunch &launch = launches[i];
    const uint32_t num_blocks = static_cast<uint32_t>(launch.num_blocks);
    size_t place = 0;
    while (place < ranks.size() && ranks[place].latest->launch->rank != launch.rank) ++place;
    running.push_back({&launch, static_cast<uint32_t>(place), static_cast<uint32_t>(machine.blocks.size()),
                       num_blocks * static_cast<uint32_t>(launch.num_threads), 0, 0, nullptr, 0, false});
    Running &r = running.back();
    if (place == ranks.size()) ranks.push_back({&r, 0, 0});
    else r.number = ranks[place].latest->number + 1, ranks[place].latest->next = &r, ranks[place].latest = &r;
    for (uint32_t index = 0; index < num_blocks; ++index) add_block(r, index);
    ranks[place].num_threads = std::max<size_t>(ranks[place].num_threads, r.live);
    ranks[place].shared_bytes =
        std::max(ranks[place].shared_bytes, num_blocks * 2 * padded(machine.blocks.back().shared_bytes));
  }
  size_t stacks_used = 0, shared_used = 0;
  for (size_t place = 0; place < ranks.size(); ++place) {
    for (Running &r : running)
      if (r.rank_index == place) r.first_stack = stacks_used, r.shared_at = shared_used;
    stacks_used += ranks[place].num_threads, shared_used += ranks[place].shared_bytes;
  }
  if (shared_memory.size() < shared_used + 1024) shared_memory.resize(shared_used + 1024);
  scheduler.num_ranks = static_cast<uint32_t>(ranks.size());
  machine.live = static_cast<uint32_t>(machine.threads.size());
}

// Vectors have their final size: sets the pointers between them.
static void connect() {
  const uint32_t num_warps = static_cast<uint32_t>(machine.warps.size());
  uint32_t warp = 0;
  for (Block &b : machine.blocks) {
    for (uint32_t i = 0; i < b.num_threads; ++i) {
      Warp &w = machine.warps[warp + i / 32];
      Thread &t = machine.threads[b.first + i];
      w.block = t.in_block = &b;
      t.warp = &w;
    }
    warp += (b.num_threads + 31) / 32;
  }
  for (Warp &w : machine.warps) w.priority = machine.random.below(num_warps);
  scheduler.next_priority = num_warps;
}

// A launch begins: its threads can run, and see what memory holds.
static void start(Running &r) {
  unsigned char *next = shared_memory.data();
  next += (-reinterpret_cast<uintptr_t>(next) & 1023) + r.shared_at;
  size_t stack_number = r.first_stack;
  for (uint32_t id = r.first_block; id < r.first_block + static_cast<uint32_t>(r.launch->num_blocks); ++id) {
    Block &b = machine.blocks[id];
    const size_t bytes = padded(b.shared_bytes);
    b.shared = next, b.engine_view = next + bytes;
    memset(next, poison_shared ? 0xA5 : 0, 2 * bytes);
    next += 2 * bytes;
    b.view_fence.assign(b.shared_bytes / 16, 0);
    for (uint32_t i = 0; i < b.num_threads; ++i, ++stack_number) {
      Thread &t = machine.threads[b.first + i];
      t.static_shared = b.shared;
      t.dynamic_shared = b.shared + b.static_bytes;
      t.warp->live |= 1u << t.lane;
      unsigned char *stack = stacks.at(stack_number);
      if (stack == nullptr) fail(kResources, "no memory for the stacks of %zu threads", machine.threads.size());
      t.context.prepare(stack, Stacks::usable(stack_number), thread_main);
      acquire(t);
      make_ready(t);
    }
  }
}

// Whether a write that `writer` has issued goes to the inbox of `r` and belongs to a launch of the same number, or an earlier one.
static bool concerns(const Running &r, const Block &writer, uint64_t address, uint32_t bytes) {
  return writer.rank_index != r.rank_index && running[writer.launch].number <= r.number &&
         address < r.launch->inbox + r.launch->inbox_bytes && r.launch->inbox < address + bytes;
}

[[noreturn]] static void fail_late(const Running &r, const char *what, const Thread &writer, uint64_t address) {
  fail(kLateStore, "launch %u of rank %d ends while a %s of launch %u by %s to %s is under way", r.number,
       r.launch->rank, what, running[writer.in_block->launch].number, describe(writer).c_str(), locate(address).c_str());
}

// The n-th launches of all ranks are one collective: once a rank's has ended, unless it gave up, the rank reads what they sent.
static void check_inbox(const Running &r) {
  if (r.launch->inbox_bytes == 0 || r.gave_up) return;
  for (const BulkRead &read : copies.reads) {
    const Thread &writer = machine.threads[read.thread];
    if (concerns(r, *writer.in_block, read.address, read.bytes)) fail_late(r, "bulk store", writer, read.address);
  }
  for (const Block &b : machine.blocks)
    for (uint32_t i = b.pending_head; i != 0; i = memory.stores[i - 1].next_in_block) {
      const Store &s = memory.stores[i - 1];
      if (concerns(r, b, s.address, s.bytes))
        fail_late(r, s.pool == kCopiedStores ? "bulk store" : "store", machine.threads[s.point.thread], s.address);
    }
}

// What the end of the launch of a block brings, once its last thread has ended: its stores land before the next one starts.
static void continue_rank(const Block &b) {
  Running &r = running[b.launch];
  if (r.live != 0) return;
  check_inbox(r);
  if (r.next == nullptr) return;
  for (uint32_t id = r.first_block; id < r.first_block + static_cast<uint32_t>(r.launch->num_blocks); ++id)
    while (machine.blocks[id].pending_head != 0) land(machine.blocks[id].pending_head);
  r.next->gave_up = r.gave_up;
  start(*r.next);
  r.next = nullptr;
}

// Sorted and disjoint: what overlaps becomes one region under the first name.
static void add_regions(const SimRegion *regions, int32_t num_regions) {
  std::vector<Region> &all = memory.regions;
  for (int32_t i = 0; i < num_regions; ++i)
    if (regions[i].bytes != 0)
      all.push_back({regions[i].address, regions[i].address + regions[i].bytes, regions[i].name, static_cast<uint32_t>(i), nullptr});
  std::stable_sort(all.begin(), all.end(), [](const Region &a, const Region &b) { return a.begin < b.begin; });
  size_t kept = 0;
  for (size_t i = 0; i < all.size(); ++i) {
    if (kept != 0 && all[i].begin < all[kept - 1].end) {
      Region &last = all[kept - 1];
      last.end = std::max(last.end, all[i].end);
      if (all[i].id < last.id) last.id = all[i].id, last.name = all[i].name;
    } else {
      all[kept++] = all[i];
    }
  }
  all.resize(kept);
  for (Region &r : all) {
    r.lines = static_cast<Line *>(calloc((r.end >> 4) - (r.begin >> 4) + 1, sizeof(Line)));
    if (r.lines == nullptr) fail(kResources, "no memory to follow region '%s'", region_name(r));
  }
}

static void clear() {
  for (Region &r : memory.regions) free(r.lines);
  machine.threads.clear(), machine.warps.clear(), machine.blocks.clear(), machine.runnable.clear();
  memory.regions.clear(), memory.stores.clear(), memory.free_stores.clear(), memory.histories.clear();
  for (std::vector<uint32_t> &pool : memory.pools) pool.clear();
  memset(memory.cache, 0, sizeof memory.cache);
  memory.changes = memory.last_acquire = memory.landed = 0, memory.any_watchers = 0;
  copies.reads.clear(), copies.loads.clear(), copies.fetched_bytes = 0;
  running.clear();
  scheduler = Scheduler{};
  machine.current = nullptr, machine.live = 0, machine.now_ns = 1000000000;
  machine.steps = machine.operations = machine.progress = machine.trace = 0;
  machine.code = kOk, machine.message.clear();
}

// ---------------------------------------------------------------- faults of ordinary accesses

static sigjmp_buf on_fault;
static pthread_t simulating;
static uint64_t fault_address;
static int fault_signal;
static constexpr int kSignals[] = {SIGSEGV, SIGBUS, SIGFPE};
static struct sigaction previous_action[3];
static unsigned char signal_stack[64 << 10];

static void handle_fault(int signal, siginfo_t *info, void *) {
  if (!pthread_equal(pthread_self(), simulating) || machine.current == nullptr) {
    for (int i = 0; i < 3; ++i)  // not a simulated thread's: as if the simulation were not there
      if (kSignals[i] == signal) sigaction(signal, &previous_action[i], nullptr);
    return;
  }
  fault_signal = signal;
  fault_address = reinterpret_cast<uint64_t>(info->si_addr);
  siglongjmp(on_fault, 1);
}

static void describe_fault() {
  const std::string who = describe(*machine.current);
  machine.current = nullptr;
  machine.code = kMemoryFault;
  if (fault_signal == SIGFPE) machine.message = who + ": integer division by zero";
  else if (stacks.is_guard(fault_address)) machine.message = who + ": the simulated thread's stack overflows";
  else machine.message = who + ": fault of an ordinary access at " + locate(fault_address);
}

// ---------------------------------------------------------------- running

static void run_to_end(const SimLaunch *launches, int32_t num_launches, const SimRegion *regions, int32_t num_regions,
                       const SimSettings &settings) {
  add_regions(regions, num_regions);
  poison_shared = settings.poison_shared != 0;
  add_launches(launches, num_launches);
  connect();
  std::vector<bool> has_started(scheduler.num_ranks, false);
  for (Running &r : running) {
    if (!has_started[r.rank_index]) start(r);
    has_started[r.rank_index] = true;
  }
  memory.stale_loads = settings.stale_loads != 0;
  scheduler.style = draw_style(settings.schedule);
  snprintf(result->style, sizeof result->style, "%s", describe_style(scheduler.style).c_str());
  while (machine.live != 0) {
    if (machine.runnable.empty()) {
      idle();
      continue;
    }
    Warp &w = pick_warp();
    run_turn(w);
    remove_if_idle(w);
    land_some();
    if (w.live == 0) continue_rank(*w.block);
    if (machine.steps > settings.max_steps) {
      machine.message = "no end after " + std::to_string(machine.steps) + " steps\n" + describe_waiting();
      machine.code = kStepLimit;
      throw Failure{};
    }
  }
  while (land_any()) {
  }
}

extern "C" int32_t tile_ep_sim_run(const SimLaunch *launches, int32_t num_launches, const SimRegion *regions,
                                   int32_t num_regions, const SimSettings *settings, SimResult *out) {
  clear();
  result = out;
  machine.random = Random(settings->seed);
  simulating = pthread_self();
  stack_t alternative{}, previous_stack;
  alternative.ss_sp = signal_stack;
  alternative.ss_size = sizeof signal_stack;
  sigaltstack(&alternative, &previous_stack);
  struct sigaction action{};
  action.sa_sigaction = handle_fault;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK;
  for (int i = 0; i < 3; ++i) sigaction(kSignals[i], &action, &previous_action[i]);
  if (sigsetjmp(on_fault, 1) == 0) {
    try {
      run_to_end(launches, num_launches, regions, num_regions, *settings);
    } catch (const Failure &) {
    }
  } else {
    describe_fault();
  }
  for (int i = 0; i < 3; ++i) sigaction(kSignals[i], &previous_action[i], nullptr);
  sigaltstack(&previous_stack, nullptr);
  out->code = machine.code;
  out->steps = machine.steps, out->operations = machine.operations, out->landed = memory.landed;
  out->fetched_bytes = copies.fetched_bytes;
  out->simulated_ns = machine.now_ns - 1000000000, out->trace = machine.trace;
  snprintf(out->message, sizeof out->message, "%s", machine.message.c_str());
  snprintf(out->stalled, sizeof out->stalled, "%s", scheduler.stalled.c_str());
  return machine.code;
}
