// A kernel file may include CUDA's own header; on the host all of it is in convt3d/host/runtime.h.
#pragma once
