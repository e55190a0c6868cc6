"""The parameter server's half: receiving, applying and answering; weights, slots and records."""
