// For NVRTC, which has all that a kernel takes from it.
#pragma once
