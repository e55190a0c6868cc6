"""What `hpsrun` is made of: finding the MPI, starting its launcher, watching the job, checking an installation."""
