"""What a broker keeps: an index of small rows and a folder of blobs."""
