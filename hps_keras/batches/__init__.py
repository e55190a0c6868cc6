"""How large each worker's batches are: measured times and memory in, numbers of samples out; pure arithmetic."""
