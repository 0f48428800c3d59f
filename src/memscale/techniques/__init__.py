"""One file a technique. Each attaches its actions to a model and hands its undo to an `ExitStack`."""
