"""The engine: bucket plan, buckets, reducer, control words and the module wrapper that the user holds."""
