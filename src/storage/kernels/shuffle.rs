//! Compression of 16 bytes by a byte shuffle, whose pattern a table has for every mask.

/// Elements of `size` bytes that one shuffle takes: a mask has at most 8 bits.
pub(super) const fn lanes(size: usize) -> usize {
    if size == 1 { 8 } else { 16 / size }
}

/// For each mask of the lanes, where each byte of the result comes from; the rest is 0, which every shuffle
/// makes of an index with the top bit.
pub(super) const fn patterns(size: usize) -> [[u8; 16]; 256] {
    let mut patterns = [[0x80; 16]; 256];
    let mut mask = 0;
    while mask < 1 << lanes(size) {
        let (mut lane, mut next) = (0, 0);
        while lane < lanes(size) {
            if mask >> lane & 1 != 0 {
                let mut byte = 0;
                while byte < size {
                    #[expect(clippy::cast_possible_truncation, reason = "below 16")]
                    let from = (lane * size + byte) as u8;
                    patterns[mask][next] = from;
                    next += 1;
                    byte += 1;
                }
            }
            lane += 1;
        }
        mask += 1;
    }
    patterns
}

pub(super) static PATTERNS: [[[u8; 16]; 256]; 3] = [patterns(1), patterns(2), patterns(4)];
