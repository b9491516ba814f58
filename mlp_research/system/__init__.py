"""The machine: devices, processes, signals, compile cache, profiles."""
