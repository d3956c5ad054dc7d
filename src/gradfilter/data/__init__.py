"""Pictures with labels or masks: data sets by name or by what lies in a folder, transforms, and partitions.

``open_data`` gives training and test samples; ``Transformed`` makes tensors of them for ``gf.fit``.
"""
