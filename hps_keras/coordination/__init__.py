"""The parameter server's decisions, without MPI, Keras or a clock: who waits, who goes on, who trains on what."""
