"""Runs compiled PTX on a CPU: how kernels are tested where there is no GPU."""
