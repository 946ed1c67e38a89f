// CUDA's named constants.
#pragma once
#include "../../standard/math_constants.h"
