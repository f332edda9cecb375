//! Every kernel that this machine can run against the plain one.

use proptest::prelude::*;

use super::{Block, Kernels, SLACK, fence, plain};

/// Bytes that are different from their neighbours, and from those of another seed.
fn noise(len: usize, seed: u64) -> Vec<u8> {
    let mut x = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    std::iter::repeat_with(|| {
        x = x.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        x.to_be_bytes()[0]
    })
    .take(len)
    .collect()
}

/// Blocks of a channel that ends right behind the last of them or later, and the number of its cells.
fn blocks() -> impl Strategy<Value = (Vec<Block>, u32)> {
    let mask = prop_oneof![
        any::<u64>(),
        Just(u64::MAX),
        Just(0x5555_5555_5555_5555),
        Just(0xFFFF),
        Just(1),
        (any::<u64>(), any::<u64>(), any::<u64>()).prop_map(|(a, b, c)| a & b & c),
        (0..64_u32).prop_map(|n| u64::MAX >> n),
    ];
    (0..3_u32, prop::collection::vec((mask, 0..70_u32), 1..40), 0..200_u32).prop_map(
        |(first, masks, behind)| {
            let (mut cell, mut blob) = (first, first);
            let mut blocks = Vec::new();
            for (mask, gap) in masks {
                let block = Block { cell, blob, mask: mask | 1 };
                blocks.push(block);
                (cell, blob) = (cell + 64 - block.mask.leading_zeros() + gap, block.blob_end());
            }
            let end = blocks.iter().map(|block| block.cell + 64 - block.mask.leading_zeros()).max();
            (blocks, end.unwrap_or(0) + behind)
        },
    )
}

fn compressed(
    kernel: super::Compress,
    size: usize,
    blocks: &[Block],
    kv_size: u32,
    at: [usize; 2],
) -> Vec<u8> {
    let [plane_at, blob_at] = at;
    let n = blocks.last().map_or(0, |block| block.blob_end() as usize) * size;
    let plane = noise(plane_at + kv_size as usize * size, 1);
    let mut blob = vec![0xEE; blob_at + n + SLACK];
    // SAFETY: the channel has `kv_size` elements, the blob those of the blocks and the slack.
    unsafe { kernel(plane.as_ptr().add(plane_at), kv_size, blocks, blob.as_mut_ptr().add(blob_at)) };
    fence();
    blob.truncate(blob_at + n);
    blob
}

fn expanded(kernel: super::Expand, size: usize, blocks: &[Block], kv_size: u32, at: [usize; 2]) -> Vec<u8> {
    let [plane_at, blob_at] = at;
    let n = blocks.last().map_or(0, |block| block.blob_end() as usize) * size;
    let mut plane = noise(plane_at + kv_size as usize * size, 1);
    let blob = noise(blob_at + n, 2);
    // SAFETY: the channel has `kv_size` elements, the blob those of the blocks.
    unsafe { kernel(plane.as_mut_ptr().add(plane_at), blocks, blob.as_ptr().add(blob_at)) };
    plane
}

proptest! {
    #[test]
    fn every_kernel_picks_what_the_plain_one_picks(
        (blocks, kv_size) in blocks(), plane_at in 0..70_usize, blob_at in 0..70_usize
    ) {
        for (i, size) in super::ELEM_SIZES.into_iter().enumerate() {
            let at = [plane_at, blob_at];
            let expected = compressed(plain::KERNELS.compress[i], size, &blocks, kv_size, at);
            for kernels in Kernels::all() {
                for streams in [false, true] {
                    let kernel = kernels.compress(size, streams).unwrap();
                    let got = compressed(kernel, size, &blocks, kv_size, at);
                    prop_assert!(got == expected, "{}, {size} bytes, streams {streams}", kernels.name);
                }
            }
        }
    }

    #[test]
    fn every_kernel_puts_what_the_plain_one_puts_and_no_other_byte(
        (blocks, kv_size) in blocks(), plane_at in 0..70_usize, blob_at in 0..70_usize
    ) {
        for (i, size) in super::ELEM_SIZES.into_iter().enumerate() {
            let at = [plane_at, blob_at];
            let expected = expanded(plain::KERNELS.expand[i], size, &blocks, kv_size, at);
            for kernels in Kernels::all() {
                let got = expanded(kernels.expand(size).unwrap(), size, &blocks, kv_size, at);
                prop_assert!(got == expected, "{}, {size} bytes", kernels.name);
            }
        }
    }

    #[test]
    fn the_plain_kernel_picks_and_puts_the_cells_of_the_bits((blocks, kv_size) in blocks()) {
        let cells: Vec<usize> = blocks
            .iter()
            .flat_map(|block| (0..64).filter(|bit| block.mask >> bit & 1 != 0).map(|bit| block.cell as usize + bit))
            .collect();
        let first = blocks[0].blob as usize;
        let plane = noise(kv_size as usize * 2, 1);
        let picked = compressed(plain::KERNELS.compress[1], 2, &blocks, kv_size, [0, 0]);
        let elements = cells.iter().flat_map(|cell| &plane[2 * cell..][..2]);
        prop_assert!(picked[2 * first..].iter().eq(elements));

        let blob = noise((first + cells.len()) * 2, 2);
        let mut expected = plane;
        for (i, cell) in cells.iter().enumerate() {
            expected[2 * cell..][..2].copy_from_slice(&blob[2 * (first + i)..][..2]);
        }
        prop_assert!(expanded(plain::KERNELS.expand[1], 2, &blocks, kv_size, [0, 0]) == expected);
    }

    #[test]
    fn every_kernel_streams_a_run_and_no_other_byte(
        len in prop_oneof![0..600_usize, 0..20_000_usize], from_at in 0..70_usize, to_at in 0..70_usize
    ) {
        let from = noise(from_at + len, 1);
        for kernels in Kernels::all() {
            let mut to = vec![0xEE; to_at + len + 64];
            // SAFETY: both have `len` bytes there.
            unsafe { (kernels.stream)(from.as_ptr().add(from_at), to.as_mut_ptr().add(to_at), len) };
            fence();
            let expected = [&vec![0xEE; to_at], &from[from_at..], &[0xEE; 64]].concat();
            prop_assert!(to == expected, "{}", kernels.name);
        }
    }

    #[test]
    fn a_clipped_block_has_the_cells_of_its_part(mask in any::<u64>(), cut in any::<(u8, u8)>()) {
        let block = Block { cell: 1000, blob: 50, mask: mask | 1 };
        let n = block.len();
        let (a, b) = (u32::from(cut.0) % n, u32::from(cut.1) % n);
        let (start, end) = (50 + a.min(b), 50 + a.max(b) + 1);
        let cells = |block: Block| {
            let bits = (0..64).filter(move |bit| block.mask >> bit & 1 != 0);
            (block.blob..).zip(bits.map(move |bit| block.cell + bit)).collect::<Vec<_>>()
        };
        let expected: Vec<_> = cells(block).into_iter().filter(|(at, _)| (start..end).contains(at)).collect();
        let clipped = block.clip(start, end);
        prop_assert_eq!(clipped.mask & 1, 1);
        prop_assert_eq!(cells(clipped), expected);
    }
}

#[test]
fn the_kernels_of_this_machine_begin_with_the_plain_ones() {
    let names: Vec<&str> = Kernels::all().iter().map(|kernels| kernels.name).collect();
    assert_eq!(names[0], "plain");
    println!("kernels that are tested here: {}", names.join(", "));
    let wanted = std::env::var("KVSTATE_KERNELS").unwrap_or_default();
    let best = names[names.len() - 1];
    assert_eq!(Kernels::get().name, names.iter().find(|&&name| name == wanted).unwrap_or(&best).to_owned());
}
