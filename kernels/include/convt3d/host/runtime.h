// The host backend's side of a kernel: included before the kernel's own source, which it then runs on the CPU.
#pragma once

#include "block.h"
#include "cuda_language.h"
#include "launch.h"
#include "specialized.h"
