// For NVRTC, which has size_t and ptrdiff_t of its own.
#pragma once
#if !defined(NULL)
#define NULL nullptr
#endif
#if !defined(offsetof)
#define offsetof(type, member) __builtin_offsetof(type, member)
#endif
