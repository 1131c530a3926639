// A stand-in: which sizes an instance pads.
#pragma once

namespace ck::tensor_operation::device {

enum struct GemmSpecialization {
  Default, MPadding, NPadding, KPadding, MNPadding, MKPadding, NKPadding, MNKPadding
};

constexpr bool PadsM(GemmSpecialization s) {
  using G = GemmSpecialization;
  return s == G::MPadding || s == G::MNPadding || s == G::MKPadding || s == G::MNKPadding;
}
constexpr bool PadsN(GemmSpecialization s) {
  using G = GemmSpecialization;
  return s == G::NPadding || s == G::MNPadding || s == G::NKPadding || s == G::MNKPadding;
}
constexpr bool PadsK(GemmSpecialization s) {
  using G = GemmSpecialization;
  return s == G::KPadding || s == G::MKPadding || s == G::NKPadding || s == G::MNKPadding;
}

}  // namespace ck::tensor_operation::device
