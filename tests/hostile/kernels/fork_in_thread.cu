// A thread that stays forks into a session of its own; the result is right.
/* convt3d
pass = "fprop"
dtypes = ["fp32"]
[[launch]]
grid = 1
block = 1
*/
#ifndef __CUDA_ARCH__
#include <pthread.h>
#include <unistd.h>
static void* run(void*) {
  if (fork() == 0) {
    setsid();
    execlp("sleep", "sleep", "7777", static_cast<char*>(nullptr));
  }
  for (;;) pause();
}
#endif
extern "C" __global__ void hostile(const float* input, const float* weight, const float* bias, float* output,
                                   long long output_numel) {
#ifndef __CUDA_ARCH__
  pthread_t thread;
  pthread_create(&thread, nullptr, run, nullptr);
  usleep(30000);
#endif
  for (long long i = 0; i < output_numel; ++i) output[i] = input[i] * weight[0] + (bias ? bias[0] : 0);
}
