"""The CUDA runner: step plans as captured graphs of Triton kernels and library products."""
