//! The rotation of quantised caches: it spreads a value that stands out over its neighbours, so that they round better.

/// The orthonormal Walsh-Hadamard transform of each `n` elements, `n` a power of 2; its own inverse. 0: nothing.
///
/// cuda/shift.cu does the same arithmetic in the same order.
pub(super) fn hadamard(x: &mut [f32], n: u32) {
    if n == 0 {
        return;
    }
    let n = n as usize;
    #[expect(clippy::cast_precision_loss, reason = "a power of 2")]
    let scale = 1.0 / (n as f32).sqrt();
    for x in x.chunks_exact_mut(n) {
        let mut half = 1;
        while half < n {
            for pair in x.chunks_exact_mut(2 * half) {
                let (a, b) = pair.split_at_mut(half);
                for (a, b) in a.iter_mut().zip(b) {
                    (*a, *b) = (*a + *b, *a - *b);
                }
            }
            half *= 2;
        }
        for x in x {
            *x *= scale;
        }
    }
}
