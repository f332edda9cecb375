//! CRC-32C: the Castagnoli polynomial, reflected, as in iSCSI (RFC 3720).

use crc_fast::{CrcAlgorithm, Digest, checksum_combine};

/// The checksum of bytes whose beginning has the checksum `crc` (0: there is none), and whose rest is `bytes`.
#[must_use]
pub fn crc32c_append(crc: u32, bytes: &[u8]) -> u32 {
    let mut digest = Digest::new_with_init_state(CrcAlgorithm::Crc32Iscsi, u64::from(!crc));
    digest.update(bytes);
    low(digest.finalize())
}

/// The checksum of bytes in two pieces, of which the second has `len` bytes.
#[must_use]
pub fn crc32c_combine(first: u32, second: u32, len: u64) -> u32 {
    low(checksum_combine(CrcAlgorithm::Crc32Iscsi, first.into(), second.into(), len))
}

/// The crate gives checksums of all widths in 64 bits.
fn low(crc: u64) -> u32 {
    let [a, b, c, d, ..] = crc.to_le_bytes();
    u32::from_le_bytes([a, b, c, d])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_check_value_of_the_standard() {
        assert_eq!(crc32c_append(0, b"123456789"), 0xe306_9283);
    }

    #[test]
    fn any_two_pieces_give_the_checksum_of_the_whole() {
        let bytes: Vec<u8> = (0..1000_u32).map(|i| i.wrapping_mul(2_654_435_761).to_le_bytes()[3]).collect();
        let whole = ::crc32c::crc32c(&bytes);
        for at in 0..=bytes.len() {
            let (first, second) = bytes.split_at(at);
            let [a, b] = [first, second].map(|piece| crc32c_append(0, piece));
            assert_eq!(crc32c_append(a, second), whole, "{at}");
            assert_eq!(crc32c_combine(a, b, second.len() as u64), whole, "{at}");
        }
    }
}
