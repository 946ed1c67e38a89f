// The one header a kernel includes: the problem, tensors with strides, element types, residue-class arithmetic.
// On a GPU it is compiled by NVRTC; on a CPU the host backend has included convt3d/host/runtime.h before it.
#pragma once

#include "convt3d/core/problem.cuh"

#include "convt3d/core/dtypes.cuh"
#include "convt3d/core/geometry.cuh"
#include "convt3d/core/view.cuh"
