// For NVRTC, which has clock of its own.
#pragma once
