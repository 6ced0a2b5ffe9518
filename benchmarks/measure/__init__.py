"""What every program here does alike: it says where its figures come from, and compares what runs side by side."""
