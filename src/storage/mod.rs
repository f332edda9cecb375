//! Where tensor bytes live.
