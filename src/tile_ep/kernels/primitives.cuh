// Leaves of primitives.py, written on top of the device layer. Warp functions are called by all 32 lanes of a
// converged warp with equal arguments, unless they say otherwise.

// ---------------------------------------------------------------- copies by a warp, any size and alignment

// `units` elements of T from `source` to `address`, both aligned to T, N loads in flight per lane.
template <typename T, int N> EP_DEVICE void ep_copy_units(uint64_t address, uint64_t source, uint64_t units, int lane) {
  for (uint64_t i = lane; i < units; i += 32 * N) {
    T value[N];
#pragma unroll
    for (int j = 0; j < N; ++j)
      if (i + 32 * j < units) value[j] = ep_load<T>(source + (i + 32 * j) * sizeof(T));
#pragma unroll
    for (int j = 0; j < N; ++j)
      if (i + 32 * j < units) ep_store<T>(address + (i + 32 * j) * sizeof(T), value[j]);
  }
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
  if (unit == 16) ep_copy_units<uint4, 8>(to, from, units, lane);
  else if (unit == 8) ep_copy_units<uint64_t, 4>(to, from, units, lane);
  else if (unit == 4) ep_copy_units<uint32_t, 4>(to, from, units, lane);
  else if (unit == 2) ep_copy_units<uint16_t, 4>(to, from, units, lane);
  else ep_copy_units<uint8_t, 4>(to, from, units, lane);
  if (lane < tail) ep_store<uint8_t>(to + body + lane, ep_load<uint8_t>(from + body + lane));
}
// One warp's long copy of 4-byte words between multiples of 16, which nothing else hides: more loads in flight, at the price
// of registers, and of code only what it needs.
EP_DEVICE void ep_copy_warp_words(uint64_t address, uint64_t source, uint64_t bytes) {
  const int lane = threadIdx.x & 31;
  const uint64_t body = bytes & ~static_cast<uint64_t>(15);
  ep_copy_units<uint4, 16>(address, source, body / 16, lane);
  if (lane < (bytes - body) / 4)
    ep_store<uint32_t>(address + body + 4 * lane, ep_load<uint32_t>(source + body + 4 * lane));
}

// Zeroes `bytes`, byte by byte up to the first 16-byte boundary and after the last one.
EP_DEVICE void ep_zero_warp(uint64_t address, uint64_t bytes) {
  const int lane = threadIdx.x & 31;
  uint64_t head = (16 - (address & 15)) & 15;
  if (head > bytes) head = bytes;
  const uint64_t units = (bytes - head) / 16, tail = bytes - head - 16 * units;
  if (lane < head) ep_store<uint8_t>(address + lane, 0);
  for (uint64_t i = lane; i < units; i += 32) ep_store<uint4>(address + head + 16 * i, uint4{0, 0, 0, 0});
  if (lane < tail) ep_store<uint8_t>(address + head + 16 * units + lane, 0);
}

// ---------------------------------------------------------------- waiting, with a bound

// What a wait that gave up leaves behind for the host: a word per peer, (epoch << 32 | phase), written whole.
EP_DEVICE void ep_record_timeout(uint64_t status, int phase, int peer, uint64_t epoch) {
  ep_store_release_sys(status + 8 * peer, (epoch << 32) | static_cast<uint64_t>(phase));
}

// Whether a word carries this epoch or one a little later: who is collectives ahead has done what was waited for, too. (A
// count of a later dispatch cannot be there: its sender would have needed this rank to enter that dispatch.) What lies further
// ahead is a word from long ago, or one that was never written.
EP_DEVICE bool ep_has_come(uint64_t word, uint64_t epoch) {
  constexpr uint32_t kMostAhead = 1u << 16;
  return static_cast<uint32_t>(word >> 32) - static_cast<uint32_t>(epoch) < kMostAhead;
}

// Waits until the upper half of the word has come to `tag`; returns its lower half, or -1 after `timeout_ns`. The host is told
// the epoch of the collective that waited.
EP_DEVICE int64_t ep_wait_tag(uint64_t address, uint64_t tag, uint64_t status, int phase, int peer, uint64_t epoch,
                              uint64_t timeout_ns) {
  uint64_t word = ep_load_acquire_sys(address);
  if (ep_has_come(word, tag)) return static_cast<int64_t>(word & 0xffffffffu);
  const uint64_t start = ep_now_ns();
  while (true) {
    word = ep_load_acquire_sys(address);
    if (ep_has_come(word, tag)) return static_cast<int64_t>(word & 0xffffffffu);
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

// `value` as an index below `number`, -1 if it is none.
EP_DEVICE int ep_index(int64_t value, int number) { return 0 <= value && value < number ? static_cast<int>(value) : -1; }

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
EP_DEVICE void ep_push_streamed(uint64_t address, const void *shared, int bytes) {
  ep_bulk_store_streamed(address, ep_shared_address(shared), bytes);
}
// One element of 2 or 4 bytes between a local array of any type and memory.
EP_DEVICE void ep_put_2(uint64_t a, const void *local) { ep_store<uint16_t>(a, *reinterpret_cast<const uint16_t *>(local)); }
EP_DEVICE void ep_get_2(void *local, uint64_t a) { *reinterpret_cast<uint16_t *>(local) = ep_load<uint16_t>(a); }
EP_DEVICE void ep_put_4(uint64_t a, const void *local) { ep_store<uint32_t>(a, *reinterpret_cast<const uint32_t *>(local)); }
EP_DEVICE void ep_get_4(void *local, uint64_t a) { *reinterpret_cast<uint32_t *>(local) = ep_load<uint32_t>(a); }
