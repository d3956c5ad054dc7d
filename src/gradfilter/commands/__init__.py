"""The commands of ``gradfilter``, one file each: ``add`` tells its options, and what they run.

torch and all else that takes time is imported when a command runs.
"""
