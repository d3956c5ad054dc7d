"""Fine-tuning: the loop behind ``gf.fit`` and ``gradfilter train``, its order, schedule and checkpoints."""
