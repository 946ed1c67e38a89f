// For NVRTC, which has memcpy and memset of its own.
#pragma once
