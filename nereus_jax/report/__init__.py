"""What the user sees: metric files, TensorBoard, progress and the timeline."""
