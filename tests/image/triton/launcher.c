/* One cubin as a library of the CUDA run time, which the modelled V100 stands in for.
 * Built with -DFATBIN="file" -DFUNCTION="name". */
#include <stddef.h>

typedef struct { unsigned x, y, z; } Dim3;
void **__cudaRegisterFatBinary(const void *);
void __cudaRegisterFatBinaryEnd(void **);
void __cudaRegisterFunction(void **, const void *, char *, const char *, int, void *, void *, void *, void *, int *);
int cudaLaunchKernel(const void *, Dim3, Dim3, void **, size_t, void *);
int cudaDeviceSynchronize(void);

__asm__(".section .nv_fatbin, \"a\"\n.balign 8\nfatbin_begin:\n.incbin \"" FATBIN "\"\n.previous\n");
extern const char fatbin_begin[];
static struct { int magic, version; const void *data; void *file; } wrapper = {0x466243b1, 1, fatbin_begin, NULL};

static void kernel(void) {}

__attribute__((constructor)) static void announce(void) {
  void **module = __cudaRegisterFatBinary(&wrapper);
  __cudaRegisterFunction(module, (const void *)kernel, FUNCTION, FUNCTION, -1, NULL, NULL, NULL, NULL, NULL);
  __cudaRegisterFatBinaryEnd(module);
}

int launch(unsigned grid, unsigned threads, unsigned shared, void **arguments) {
  Dim3 blocks = {grid, 1, 1}, block = {threads, 1, 1};
  int status = cudaLaunchKernel((const void *)kernel, blocks, block, arguments, shared, NULL);
  return status ? status : cudaDeviceSynchronize();
}
