"""Drop-in pieces for trainers of others, one file each; each needs its own library, and no other."""
