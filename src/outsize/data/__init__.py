"""Pictures, captions, buckets, content-addressed caches, and the pure schedule of batches."""
