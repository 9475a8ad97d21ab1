// Names waits for the reports: see the end of sim_device.h.
#pragma once
#include "sim_cuda.h"

#ifdef ep_wait_tag
#undef ep_wait_tag
template <typename Phase, typename Peer>
static inline int64_t ep_wait_tag(uint64_t address, uint64_t tag, uint64_t status, Phase phase, Peer peer,
                                  uint64_t epoch, uint64_t timeout_ns) {
  tile_ep_sim_wait_begin(phase, peer, epoch);
  const int64_t result = ep_wait_tag_unnamed(address, tag, status, phase, peer, epoch, timeout_ns);
  tile_ep_sim_wait_end(result);
  return result;
}
#endif
