// assert of a kernel: one that fails ends the launch, with its place. Like the C header it is included anew each time.
#include "../block.h"

#undef assert
#if defined(NDEBUG)
#define assert(condition) static_cast<void>(0)
#else
#define assert(condition) \
  ((condition) ? static_cast<void>(0) : convt3d_host::stop_block("assertion failed: " #condition, __FILE__, __LINE__))
#endif
