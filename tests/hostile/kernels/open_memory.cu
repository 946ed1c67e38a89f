// It opens the memory of the processes that judge it and ask for it: root may, unless it has given that up.
/* convt3d
pass = "fprop"
dtypes = ["fp32"]
[[launch]]
grid = 1
block = 1
*/
#ifndef __CUDA_ARCH__
#include <fcntl.h>
#include <unistd.h>
#include <cstdio>
#include <fstream>
#include <string>
#endif
extern "C" __global__ void hostile(const float* input, const float* weight, const float* bias, float* output,
                                   long long output_numel) {
#ifndef __CUDA_ARCH__
  int pid = getppid(), opened = 0;
  for (int up = 0; up < 2 && pid > 1; ++up) {
    opened += open(("/proc/" + std::to_string(pid) + "/mem").c_str(), O_RDWR) >= 0;
    std::ifstream status("/proc/" + std::to_string(pid) + "/status");
    for (std::string word; status >> word;) {
      if (word == "PPid:") {
        status >> pid;
        break;
      }
    }
  }
  _exit(40 + opened);
#endif
}
