"""EROFS images: a streaming writer and a bounds-checked reader of the subset that BootSeer writes.

The subset and the reasons for it: docs/formats/erofs.md.
"""
