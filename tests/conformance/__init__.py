"""Is the emulated NPU's operator layer right? PyTorch's own operator database, on the CPU and on the NPU, compared."""
