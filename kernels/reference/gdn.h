// What the host files of the gated delta rule share: which rows and which slot a sequence has.
#ifndef NVFP4_REFERENCE_GDN_H_
#define NVFP4_REFERENCE_GDN_H_

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "host.h"

namespace nvfp4::host {

struct Sequence {
  bool is_used;  // its slot is in range and it has tokens
  bool has_initial_state;
  int64_t slot, begin, end;  // rows begin .. end-1
};

// Sequence `index` of an nvfp4_conv or nvfp4_delta.
template <typename Call>
Sequence SequenceOf(const Call& call, int64_t index) {
  Sequence found{};
  found.slot = call.slots[index];
  found.begin = call.query_start[index];
  found.end = call.query_start[index + 1];
  if (index < call.decode_sequences) {
    found.end = std::min(found.end, found.begin + 1);
  }
  found.is_used =
      found.slot >= call.first_slot && found.slot < call.slot_count && found.end > found.begin;
  found.has_initial_state = call.has_initial_state == nullptr || call.has_initial_state[index] != 0;
  return found;
}

inline double Sigmoid(double z) { return 1.0 / (1.0 + std::exp(-z)); }

}  // namespace nvfp4::host

#endif  // NVFP4_REFERENCE_GDN_H_
