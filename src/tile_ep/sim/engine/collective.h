// Rendezvous of the lanes of a warp and of the threads of a block.
#pragma once
#include "state.h"

static const char *const kCollectiveNames[] = {"__syncwarp",      "__shfl_sync",     "__shfl_up_sync",
                                               "__shfl_down_sync", "__shfl_xor_sync", "__match_any_sync",
                                               "__match_all_sync", "__ballot_sync (or __any_sync, __all_sync)"};

// What lane `i` reads in a shuffle: its segment's lane, or itself past the end of the segment.
static uint32_t shuffle_source(int32_t kind, uint32_t i, uint32_t argument, uint32_t width) {
  const uint32_t begin = i & ~(width - 1), end = begin + width;
  if (kind == kShfl) return begin | (argument & (width - 1));
  if (kind == kShflUp) return i < begin + argument ? i : i - argument;
  if (kind == kShflDown) return argument >= end || i + argument >= end ? i : i + argument;
  return (i ^ argument) >= end ? i : i ^ argument;
}

// After a barrier of lanes, each of them is ordered after all that any of them was.
static void join_lanes(Warp &w, uint32_t arrived) {
  Thread *lanes = &machine.threads[w.first];
  uint64_t acquired = 0;
  for (uint32_t i = 0; i < 32; ++i)
    if (arrived >> i & 1 && lanes[i].acquired > acquired) acquired = lanes[i].acquired;
  for (uint32_t i = 0; i < 32; ++i)
    if (arrived >> i & 1) lanes[i].acquired = acquired;
  if ((arrived & w.live) == w.live) {
    ++w.epoch;
    return;
  }
  if (w.known.empty()) w.known.assign(32 * 32, 0);
  uint32_t joined[32] = {};
  for (uint32_t i = 0; i < 32; ++i) {
    if (!(arrived >> i & 1)) continue;
    for (uint32_t j = 0; j < 32; ++j) joined[j] = w.known[i * 32 + j] > joined[j] ? w.known[i * 32 + j] : joined[j];
    if (lanes[i].points > joined[i]) joined[i] = lanes[i].points;
  }
  for (uint32_t i = 0; i < 32; ++i)
    if (arrived >> i & 1) memcpy(&w.known[i * 32], joined, sizeof joined);
}

static void compute_results(Warp &w, const Rendezvous &r) {
  Thread *lanes = &machine.threads[w.first];
  uint32_t ballot = 0;
  bool alike = true;
  uint64_t first = 0;
  if (r.kind == kBallot || r.kind == kMatchAll) {
    first = lanes[__builtin_ctz(r.arrived)].operand;
    for (uint32_t i = 0; i < 32; ++i) {
      if (!(r.arrived >> i & 1)) continue;
      ballot |= static_cast<uint32_t>(lanes[i].operand != 0) << i;
      alike = alike && lanes[i].operand == first;
    }
  }
  for (uint32_t i = 0; i < 32; ++i) {
    if (!(r.arrived >> i & 1)) continue;
    Thread &t = lanes[i];
    switch (r.kind) {
      case kSyncWarp: break;
      case kBallot: t.result = ballot; break;
      case kMatchAll: t.result = alike ? r.arrived : 0; break;
      case kMatchAny: {
        uint32_t same = 0;
        for (uint32_t j = 0; j < 32; ++j)
          same |= static_cast<uint32_t>(r.arrived >> j & 1 && lanes[j].operand == t.operand) << j;
        t.result = same;
        break;
      }
      default: {
        const uint32_t source = shuffle_source(r.kind, i, static_cast<uint32_t>(t.extra), r.width);
        // The register of a lane that does not take part is anything.
        t.result = r.arrived >> source & 1 ? lanes[source].operand : 0xa5a5a5a5a5a5a5a5ull;
      }
    }
  }
}

// Finishes rendezvous `at` of the warp if all of its lanes that still run have come. True when it did.
static bool finish_if_complete(Warp &w, size_t at) {
  const Rendezvous r = w.open[at];
  if ((r.mask & w.live & ~r.arrived) != 0 || r.arrived == 0) return false;
  w.open.erase(w.open.begin() + static_cast<ptrdiff_t>(at));
  compute_results(w, r);
  if (r.kind == kSyncWarp) join_lanes(w, r.arrived);
  ++machine.progress;
  for (uint32_t i = 0; i < 32; ++i) {
    Thread &t = machine.threads[w.first + i];
    if (r.arrived >> i & 1 && t.state == kInCollective) make_ready(t);
    if (i + 1 < 32 && (r.arrived >> (i + 1)) == 0) break;
  }
  return true;
}

extern "C" uint64_t tile_ep_sim_collective(int32_t kind, uint32_t mask, uint64_t operand, uint64_t extra,
                                           int32_t line) {
  Thread &t = *machine.current;
  Warp &w = *t.warp;
  const uint32_t width = static_cast<uint32_t>(extra >> 32);
  if (!(mask >> t.lane & 1))
    fail(kMisuse, "%s at line %d: the mask %08x does not name the calling lane", kCollectiveNames[kind], line, mask);
  const bool shuffles = kind >= kShfl && kind <= kShflXor;
  if (shuffles && (width == 0 || width > 32 || (width & (width - 1)) != 0))
    fail(kMisuse, "%s at line %d: width %u is no power of two up to 32", kCollectiveNames[kind], line, width);
  t.kind = kind, t.mask = mask, t.line = line, t.operand = operand, t.extra = extra;
  size_t at = 0;
  while (at < w.open.size() && w.open[at].mask != mask) ++at;
  if (at == w.open.size()) w.open.push_back({mask, 0, kind, width});
  Rendezvous &r = w.open[at];
  if (r.kind != kind || r.width != width) {
    const Thread &other = machine.threads[w.first + static_cast<uint32_t>(__builtin_ctz(r.arrived))];
    fail(kMisuse, "%s at line %d, while lane %u of the same mask %08x is in %s at line %d", kCollectiveNames[kind],
         line, other.lane, mask, kCollectiveNames[other.kind], other.line);
  }
  r.arrived |= 1u << t.lane;
  if (!finish_if_complete(w, at)) block_thread(t, kInCollective);
  return t.result;
}

static bool finish_block_barrier(Block &b) {
  if (b.arrived == 0 || b.arrived < b.live) return false;
  uint64_t acquired = 0;
  for (uint32_t i = 0; i < b.num_threads; ++i) {
    const Thread &t = machine.threads[b.first + i];
    if (t.state != kDone && t.acquired > acquired) acquired = t.acquired;
  }
  ++b.epoch;
  ++machine.progress;
  b.arrived = 0;
  for (uint32_t i = 0; i < b.num_threads; ++i) {
    Thread &t = machine.threads[b.first + i];
    t.acquired = acquired;
    if (t.state == kInBlockBarrier) make_ready(t);
  }
  return true;
}

extern "C" void tile_ep_sim_sync_block(int32_t line) {
  Thread &t = *machine.current;
  t.line = line;
  ++t.in_block->arrived;
  if (!finish_block_barrier(*t.in_block)) block_thread(t, kInBlockBarrier);
}

// A thread has left: those who wait for it need not any more.
static void count_out(Thread &t) {
  Warp &w = *t.warp;
  w.live &= ~(1u << t.lane);
  for (size_t at = 0; at < w.open.size();) {
    if (!finish_if_complete(w, at)) ++at;
  }
  --t.in_block->live;
  finish_block_barrier(*t.in_block);
}
