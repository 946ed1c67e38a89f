// For NVRTC, which has abs, malloc and free of its own.
#pragma once
