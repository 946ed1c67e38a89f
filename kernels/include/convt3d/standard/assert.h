// For NVRTC, which has assert of its own.
#pragma once
