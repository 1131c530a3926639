// A stand-in: layouts of matrices.
#pragma once

namespace ck::tensor_layout::gemm {

struct RowMajor { static constexpr bool is_row = true; };
struct ColumnMajor { static constexpr bool is_row = false; };

}  // namespace ck::tensor_layout::gemm
