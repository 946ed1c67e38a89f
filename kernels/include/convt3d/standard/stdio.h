// For NVRTC, which has printf of its own.
#pragma once
