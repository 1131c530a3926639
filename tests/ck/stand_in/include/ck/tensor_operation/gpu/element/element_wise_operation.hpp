// A stand-in: functions of single elements.
#pragma once

#include "ck/ck.hpp"

namespace ck::tensor_operation::element_wise {

struct PassThrough {
  template <typename E, typename C> void operator()(E &e, const C &c) const {
    e = ck::type_convert<E>(c);
  }
};

}  // namespace ck::tensor_operation::element_wise
