// The one header a kernel includes: the problem, tensors with strides, element types, residue-class arithmetic.
// On a GPU it is compiled by NVRTC; on a CPU the host backend has included convt3d/host/runtime.h before it.
#pragma once

#include "convt3d/problem.cuh"

#include "convt3d/dtypes.cuh"
#include "convt3d/geometry.cuh"
#include "convt3d/view.cuh"
